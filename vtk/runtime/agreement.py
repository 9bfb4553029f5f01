"""Top-1 agreement of two models: the share of images with the same most likely class."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vtk.errors import UsageError
from vtk.evaluation.config import EvalConfig
from vtk.evaluation.restriction import Restriction
from vtk.runtime.backends.base import Backend, load_backend, predictor
from vtk.runtime.run_conditions import Conditions, choose_conditions
from vtk.runtime.source import Source

_FILES = {"onnx": "an ONNX file", "openvino": "an OpenVINO model"}


class Agreement:
    """Counts images for which a second model has the same most likely class."""

    def __init__(self, backend: Backend, name: str, restriction: Restriction | None = None) -> None:
        self.backend, self.name, self.restriction = backend, name, restriction
        self.same = self.count = 0

    @classmethod
    def of(
        cls, source: Source, reference: Source | None, conditions: Conditions, config: EvalConfig,
        restriction: Restriction | None = None,
    ) -> "Agreement | None":  # fmt: skip
        """Return a comparison of ``source`` with its reference, or with itself as it was trained; or None.

        Under a restriction both choose among its classes.

        Raises:
            UsageError: the reference is an ONNX file, or has other classes or preprocessing.
        """
        judge = reference or source
        if reference is not None and reference.kind in _FILES:
            raise UsageError(f"`--reference` {reference.path} is {_FILES[reference.kind]}; give a pack or a checkpoint")
        if judge.kind in _FILES:
            return None
        # bf16 rounding in training is not an error of an fp32 file: compare with torch in its own precision
        ways = choose_conditions(judge, precision=source.facts.precision if source.kind in _FILES else None)
        if reference is None and (ways.backend, ways.precision, ways.device) == (
            conditions.backend, conditions.precision, conditions.device
        ):  # fmt: skip
            return None  # it would compare the model with itself
        if judge.card.classes != source.card.classes:
            raise UsageError(f"`--reference` {judge.name} has other classes than {source.name}; give its own pack")
        if judge.card.input != source.card.input:
            raise UsageError(
                f"`--reference` {judge.name} has another preprocessing than {source.name}; give its own pack"
            )
        backend = load_backend(ways.backend, judge, device=ways.device, dtype=ways.precision, threads=config.threads)
        return cls(backend, f"{judge.name} ({ways.backend}, {ways.precision}, {backend.device})", restriction)

    @property
    def fraction(self) -> float:
        """Fraction of the images so far; NaN before the first."""
        return self.same / self.count if self.count else math.nan

    def watch(self, predict: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return ``predict`` with the comparison at each call."""
        other = predictor(self.backend)
        if self.restriction is not None:
            other = self.restriction.wrap(other)

        def both(images: Tensor) -> Tensor:
            logits = predict(images)
            mine, theirs = logits.argmax(1).cpu(), other(images).argmax(1).cpu()
            self.same += int(torch.eq(mine, theirs).sum())
            self.count += len(mine)
            return logits

        return both
