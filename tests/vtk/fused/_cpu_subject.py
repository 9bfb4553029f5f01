"""A fused model on the CPU as what is tuned: its passes take as long as a made-up table says, by a made-up clock."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vtk.fused import tuning
from vtk.fused.stages import Plan
from vtk.fused.tuning_card import ModelSubject
from vtk_kernels import choices

CARD = "NVIDIA A10"
QUICK = {"linear_gelu": "aten", "splitk_linear": "triton", "ln_folded": "folded"}
"""The choices that make a pass quicker, each by a twentieth, and the form by half."""


class Clock:
    """Time that passes only when a pass runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CpuPass:
    """A pass with the choices of its making: what it asks, what it answers, and what it would take."""

    def __init__(self, subject: "CpuSubject") -> None:
        with choices.record_questions() as asked, torch.no_grad():
            self.output = subject.compute(subject.images)
        self.subject = subject
        held = {(q.op, choices.choose(*q, CARD)) for q in asked}
        self.us = 1000.0
        for q in dict.fromkeys(asked):
            if choices.choose(*q, CARD) == subject.quick.get(q.op):
                self.us *= 0.5 if q.op == "ln_folded" else 0.95
        self.us *= 1.0 if subject.slow is None or ("linear_gelu", subject.slow) not in held else 3.0
        if subject.breaks in held:
            self.output = self.output + 1

    def __call__(self) -> None:
        self.subject.runs += 1

    def wrong(self) -> str | None:
        return self.subject.judge(self.output)


class CpuSubject(ModelSubject):
    """A model on the CPU whose operations are those of a card, by their references."""

    quick = QUICK
    slow: str | None = None
    breaks: Any = None
    runs = made = 0

    def place(self) -> tuple[str, str, str]:
        return CARD, str(choices._minor("torch")), str(choices._minor("triton"))

    def compute(self, images: Tensor) -> Tensor:
        return self.model.compute(images, Plan(True, CARD, None))

    def prepare(self) -> CpuPass:  # type: ignore[override]
        self.made += 1
        return CpuPass(self)


def timer(clock: Clock, noise: float = 0.0) -> tuning.Timer:
    generator = torch.Generator().manual_seed(0)

    def time(passes: Sequence[Any]) -> list[float]:
        for run in passes:
            run()
        clock.now += sum(run.us for run in passes) / 1e6
        return [run.us * (1 + noise * float(torch.randn((), generator=generator))) for run in passes]

    return time
