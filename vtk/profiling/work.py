"""Counts the work of a forward pass, and compares measurements with the roofline."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vtk.models.devices import itemsize


@dataclass(frozen=True)
class Work:
    """Of one model.

    Attributes:
        flops: of matrix products, convolutions and attention for one image, two per multiply-add.
        parameters: numbers that are read once for each call, however many images it has.
        values: numbers of one image and its logits.
    """

    flops: int
    parameters: int
    values: int

    def floor_s(self, batch: int, precision: str, ceilings: "Ceilings") -> float | None:
        """Return the least seconds for ``batch`` images on a device that does nothing else (the roofline).

        The larger of the products at the rate of a large product, and of weights, images and logits, each moved once,
        at the rate of a large copy. Activations may stay in a cache and are left out: a floor, not an estimate.
        """
        rate = ceilings.flop_per_s.get(precision)
        if rate is None:
            return None
        return max(batch * self.flops / rate, self.moved_bytes(batch, precision) / ceilings.bytes_per_s)

    def moved_bytes(self, batch: int, precision: str) -> int:
        """Return the bytes of weights, images and logits."""
        return itemsize(precision) * (self.parameters + batch * self.values)


@dataclass(frozen=True)
class Ceilings:
    """What a device reached in isolation.

    Attributes:
        bytes_per_s: of a large copy, read and written.
        flop_per_s: of a large matrix product, by precision.
        date: when, ISO 8601.
    """

    bytes_per_s: float
    flop_per_s: dict[str, float]
    date: str = ""


def work_of(model: nn.Module, shape: tuple[int, ...], classes: int) -> Work | None:
    """Count the work of ``model`` for one image (C, H, W) on the meta device, without computing anything.

    Returns:
        None where a part of the model needs real numbers to run.
    """
    parameters = sum(p.numel() for p in model.parameters())
    values = classes + _count(shape)
    try:
        counter: Any = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            # frozen: the counter hooks inputs that ask for gradients, and fails at a class token on its own (PiT)
            model.eval().requires_grad_(False).to("meta")(torch.empty(1, *shape, device="meta"))
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return Work(int(counter.get_total_flops()), parameters, values)


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
