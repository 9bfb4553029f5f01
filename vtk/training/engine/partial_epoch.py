"""An epoch between two of its steps: what its row of numbers is made of so far, and what goes on from there."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Midway:
    """The part of an epoch that is done.

    Attributes:
        epoch: from 0.
        totals: (learners,) this process's losses of the steps so far, times images.
        perturbed: (2, learners) the same of a rule's second pass, of the steps that were taken, and their images.
        counted: images of the steps that were taken, for each learner; of all processes.
        step: steps done.
        seen: images of them, of all processes.
        skipped: updates that were left out.
        seconds: that these steps took.
        logs: sums of what the objective told, of this process.
    """

    epoch: int
    totals: Tensor
    perturbed: Tensor
    counted: list[int]
    step: int = 0
    seen: int = 0
    skipped: int = 0
    seconds: float = 0.0
    logs: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, epoch: int, learners: int, device: torch.device) -> "Midway":
        """Return an epoch of which nothing is done."""
        return cls(epoch, torch.zeros(learners, device=device), torch.zeros(2, learners, device=device), [0] * learners)

    def state_dict(self) -> dict[str, Any]:
        """Return it as numbers and tensors."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], device: torch.device) -> "Midway":
        """Return what `state_dict` was asked of."""
        values = dict(state)
        values |= {name: values[name].to(device) for name in ("totals", "perturbed")}
        values["logs"] = {key: value.to(device) for key, value in values["logs"].items()}
        return cls(**values)


def to_cpu(value: Any) -> Any:
    """Return nested lists and dicts with their tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_cpu(each) for key, each in value.items()}
    return [to_cpu(each) for each in value] if isinstance(value, (list, tuple)) else value


def copy_into(tensors: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Overwrite tensors with saved ones of the same shapes.

    Raises:
        ValueError: there are more or fewer, or one has another shape.
    """
    with torch.no_grad():
        for tensor, value in zip(tensors, saved, strict=True):
            if tensor.shape != value.shape:
                raise ValueError(f"a saved buffer is {tuple(value.shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(value)
