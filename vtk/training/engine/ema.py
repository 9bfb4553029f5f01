"""Exponential moving average of the trained weights, which is evaluated and packed in their place.

After update t (from 1) the average is d·average + (1 − d)·weights with d = min(decay, (1 + t) / (10 + t)): a fixed
decay close to 1 would still hold the untrained head after the few hundred steps of a fine-tuning run.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import DataError

WARMING = 10
"""Updates from which on the average keeps about half of itself and more."""


def decay_at(step: int, decay: float) -> float:
    """Return the share of the average that update ``step`` (from 1) keeps."""
    return min(decay, (1 + step) / (WARMING + step))


class Ema:
    """An average of some parameters, in their own dtype and on their device; frozen weights have none.

    Args:
        parameters: by name; fp32 masters, and buffers that training changes.
        decay: in [0, 1).

    Attributes:
        step: updates so far.
        averages: by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay, self.step = decay, 0
        self._parameters = dict(parameters)
        self.averages = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now."""
        self.step += 1
        torch._foreach_lerp_(list(self.averages.values()), self.tensors(), 1 - self.kept())

    def kept(self) -> float:
        """Return the share of the average that this update, number ``step``, keeps."""
        return decay_at(self.step, self.decay)

    def skip(self) -> None:
        """Do nothing: a step that was left out leaves the average as it is."""

    def tensors(self) -> list[Tensor]:
        """Return the parameters as they are, in the order of ``averages``."""
        return [p.detach() for p in self._parameters.values()]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the parameters be the averages inside of the context; storages are exchanged, nothing is copied."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        """Exchange parameters and averages."""
        for name, parameter in self._parameters.items():
            parameter.data, self.averages[name] = self.averages[name], parameter.data

    def buffers(self) -> list[Tensor]:
        """Return the averages of buffers, which each process counts from its own images."""
        named = self._parameters.items()
        return [self.averages[name] for name, tensor in named if not isinstance(tensor, nn.Parameter)]

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; the tensors are not copied."""
        return {"step": self.step, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            DataError: it is not one of these parameters.
        """
        saved = state.get("averages", {})
        if not isinstance(state.get("step"), int) or saved.keys() != self.averages.keys():
            raise DataError("`--resume`: the saved state has no average of these weights; start another run")
        for name, average in self.averages.items():
            if saved[name].shape != average.shape:
                raise DataError(f"`--resume`: the saved average of `{name}` does not fit; start another run")
            average.copy_(saved[name])
        self.step = state["step"]
