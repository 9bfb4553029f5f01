"""A fused model whose wide products are in fp8 (e4m3), calibrated on images like those it will be used on."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vtk.errors import UnavailableError, UsageError
from vtk.fused.fp8_stages import Fp8Stage, check_stage, fp8_stage
from vtk.fused.model import FusedViT, in_autocast
from vtk.fused.norms import normalize
from vtk.fused.scaled_product import ScaledTokens
from vtk.fused.stages import Plan, context_mean
from vtk_kernels.add_norm import add_norm
from vtk_kernels.add_norm_e4m3 import add_norm_e4m3
from vtk_kernels.context_broadcast import context_broadcast
from vtk_kernels.quantize_rows import quantize_rows

LEAST_CAPABILITY = (8, 9)
"""Ada: the first cards that multiply e4m3."""

_PLAN = Plan(kernels=True)
"""Also on a CPU: there the operations' references compute what the kernels do."""


class Fp8ViT(FusedViT):
    """A `FusedViT` with qkv, fc1 and fc2 in e4m3; tokens, attention, projection, stem and head are in bf16.

    On a CPU it is a simulation, to tell what fp8 does to a model's outputs: the numbers are a GPU's, the time is not.
    `to_fp8` makes it.
    """

    def compute(self, images: Tensor, plan: Plan | None = None) -> Tensor:
        """Run without a graph, always in the one form that it has."""
        if in_autocast(images.device.type):
            with torch.autocast(images.device.type, enabled=False):
                return self.compute(images, plan)
        x, h = self.begin(images)
        for i in range(len(self.stages)):
            x, h = self.advance(i, x, h)
        return self.head(h, kernels=True)

    def begin(self, images: Tensor) -> tuple[Tensor, ScaledTokens]:
        """Return the tokens of images (B, chans, height, width), and in e4m3 what the first stage reads."""
        first: Any = self.stages[0]
        x, tokens = self.embed(self._cast(images), first.stage.norm, _PLAN)
        return x, _read(first, tokens)

    def advance(self, i: int, x: Tensor, h: ScaledTokens, *, prune: bool = True) -> tuple[Tensor, Any]:
        """Run a stage on the residual stream x (B, N, C).

        Args:
            i: number of the stage.
            x: residual stream before it.
            h: the same, normalised, in e4m3.
            prune: leave out tokens that nobody reads, where the model does.

        Returns:
            x behind the stage, and what the next stage reads; behind the last one what the head reads, in bf16.
        """
        stage: Any = self.stages[i]
        reader: Any = self.stages[i + 1] if i + 1 < len(self.stages) else None
        norm = self.head.norm if reader is None else reader.stage.norm
        queries = self.head.queries if prune and i == self.pruned else None
        x = x[:, :queries]
        y: Tensor = stage(h, queries)
        if stage.stage.end:
            x = context_broadcast(x, y, stage.stage.end_scale)
        elif norm is None or norm.kind != "layer":
            x = x + y
        elif reader is None:
            return add_norm(x, y, norm.eps)[:2]
        elif not reader.stage.front:
            x, codes, scale = add_norm_e4m3(x, y, norm.eps)
            return x, ScaledTokens(codes, scale)
        else:
            x = x + y
        tokens = x if norm is None else normalize(x, norm, kernels=True)
        return x, tokens if reader is None else _read(reader, tokens)

    def _tune(self, batch_sizes: Sequence[int], size: tuple[int, int] | None) -> None:
        raise UsageError("an fp8 model has one form and nothing to tune; leave out `tune`")

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if (asked := fn(torch.empty(0, dtype=torch.bfloat16)).dtype) != torch.bfloat16:
            raise UsageError(
                f"an fp8 model keeps the rest of it in bf16, and was to become {asked}; fuse the model anew"
            )
        return super()._apply(fn, recurse)


def _read(stage: Fp8Stage, tokens: Tensor) -> ScaledTokens:
    """Round normalised tokens (B, N, C) for a stage, behind its Context Broadcasting."""
    if stage.stage.front:
        tokens = context_mean(tokens, stage.stage.front_scale)
    return ScaledTokens(*quantize_rows(tokens))


@torch.no_grad()
def to_fp8(fused: FusedViT, batches: Iterable[Tensor] = ()) -> Fp8ViT:
    """Round the wide matrices of a fused model to e4m3, stage by stage, each for what the rounded ones before give it.

    Args:
        fused: of `vtk.fused.fuse` in fp32; its tensors are taken over, so that it is of no use afterwards.
        batches: images (B, chans, height, width) to calibrate on, normalised; where they have fewer tokens than a
            matrix has columns, each of its numbers is rounded by itself.

    Raises:
        UsageError: a model that is not in fp32, a matrix whose sides are not multiples of 16, or a part that has no
            form in fp8 (rotary positions, gates, norms before the second layer).
    """
    check_fp8(fused)
    stages = [fp8_stage(stage, f"stages.{i}") for i, stage in enumerate(fused.stages)]  # type: ignore[arg-type]
    model = Fp8ViT(fused.embed, stages, fused.head, pruned=fused.pruned)  # type: ignore[arg-type]
    model.to(torch.bfloat16)
    states = [model.begin(images.to(model.device)) for images in batches]
    for i, stage in enumerate(stages):
        stage.round([h for _, h in states])
        # all tokens, also of a block that is pruned to one: the others of an image are like it
        last = i + 1 == len(stages)
        states = [] if last else [model.advance(i, x, h, prune=False) for x, h in states]
    return model


def check_fp8(fused: FusedViT) -> None:
    """Refuse a fused model that has no form in fp8, before anything is read or computed for it.

    Raises:
        UsageError: as `to_fp8`.
    """
    if fused.dtype != torch.float32:
        raise UsageError(f"`fused` is in {fused.dtype}; weights are rounded once: give `fuse(model, torch.float32)`")
    for i, stage in enumerate(fused.stages):
        check_stage(stage, f"stages.{i}")  # type: ignore[arg-type]


def check_fp8_device(device: torch.device) -> None:
    """Refuse a GPU without fp8 products; a CPU simulates them.

    Raises:
        UnavailableError: names the GPU, its compute capability, and the least.
    """
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        have, least = (".".join(map(str, numbers)) for numbers in (found, LEAST_CAPABILITY))
        raise UnavailableError(
            f"fp8 needs a GPU of compute capability {least} or newer; {torch.cuda.get_device_name(device)} has "
            f"{have}; use bf16"
        )
