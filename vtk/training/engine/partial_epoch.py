"""An epoch between two of its steps: the sums of its row of numbers, and the state that a resumed run continues."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vtk.training.engine.learner import Learner
from vtk.training.engine.processes import Ranks


@dataclass
class PartialEpoch:
    """The part of an epoch that is done.

    Attributes:
        epoch: from 0.
        totals: (learners,) this process's losses of the steps so far, times images.
        perturbed: (2, learners) the same of a rule's second pass, of the steps that were taken, and their images.
        counted: images of the steps that were taken, for each learner; of all processes.
        step: steps done.
        seen: images of them, of all processes.
        skipped: skipped updates.
        seconds: that these steps took.
        logs: sums of the objective's further numbers, of this process.
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
    def start(cls, epoch: int, learners: int, device: torch.device) -> "PartialEpoch":
        """Return an epoch before its first step."""
        return cls(epoch, torch.zeros(learners, device=device), torch.zeros(2, learners, device=device), [0] * learners)

    def state_dict(self) -> dict[str, Any]:
        """Return it as numbers and tensors."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], device: torch.device) -> "PartialEpoch":
        """Return the epoch whose `state_dict` this is."""
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


def epoch_row(
    part: PartialEpoch, learners: Sequence[Learner], ranks: Ranks, *, joint: bool, passes: int, skips: bool
) -> dict[str, float]:
    """Return the numbers of an epoch from its sums; all processes take part.

    Args:
        part: the epoch, of which all steps are done.
        learners: all of the run.
        ranks: this process and the others.
        joint: whether each learner has columns of its own.
        passes: forward passes of the step rule; of two the loss of the second is a column.
        skips: whether the loss scaler leaves out updates, so that their number is a column.
    """
    sums, images = ranks.sum(part.totals).tolist(), sum(part.counted)
    row = {"epoch": float(part.epoch + 1), "loss": sum(sums) / images, "lr": learners[0].lr}
    if joint:
        for learner, loss, count in zip(learners, sums, part.counted, strict=True):
            row |= {f"loss {learner.name}": loss / count, f"lr {learner.name}": learner.lr}
    row |= {key: float(ranks.sum(value)) / images for key, value in part.logs.items()}
    if passes > 1:
        losses, counts = ranks.sum(part.perturbed[0]).tolist(), part.perturbed[1].tolist()
        row |= {"perturbed_loss": sum(losses) / sum(counts)} if sum(counts) else {}
        if joint:
            pairs = zip(learners, losses, counts, strict=True)
            row |= {f"perturbed_loss {learner.name}": loss / count for learner, loss, count in pairs if count}
    if part.skipped or skips:
        row["skipped_steps"] = float(part.skipped)
    return row | {"seconds": part.seconds, "images_per_second": part.seen / part.seconds}
