"""Estimates the memory of a training step by counting on a copy of the model without contents.

torch's fake tensors have shapes and storages but no numbers, so the whole model runs in a moment and autograd's hook
counts exactly what a real pass would keep. Kept bytes are a constant and a multiple of the images; two runs tell both.
What is there while the backward of one block runs (`working`) is estimated from its widths.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from timm.layers import SwiGLU
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vtk.models.devices import DTYPES
from vtk.training.finetune_config import MODES, MemoryMode
from vtk.training.frozen_ffn.blocks import apply_memory_mode, remove_memory_mode
from vtk.training.frozen_ffn.formula import KeptUnits, kept_units
from vtk.training.frozen_ffn.parts import is_block
from vtk.training.policies.policy import train_mode


@dataclass(frozen=True)
class Footprint:
    """Bytes of a training step.

    Attributes:
        mode: memory mode.
        image: kept for backward per image.
        constant: kept whatever the number of images.
        units: kept per token and block, in C elements; None for a model without blocks of tokens.
        working: besides, per image, while one block runs backward (an estimate).
        weights: parameters, buffers, and in bf16 and fp16 the casts of trained masters.
        gradients: of trained parameters.
        optimizer: state of the optimizer, and the average of the trained weights where one is kept.
        formula: of the units, in the hidden ratio ρ; None where none is derived.
    """

    mode: MemoryMode
    image: int
    constant: int
    units: float | None
    working: int
    weights: int
    gradients: int
    optimizer: int
    formula: KeptUnits | None = None

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.constant + self.weights + self.gradients + self.optimizer

    def activations(self, batch: int) -> int:
        """Bytes of a forward pass over ``batch`` images, and what their backward pass works with."""
        return batch * (self.image + self.working)

    def total(self, batch: int) -> int:
        """Bytes of a training step on ``batch`` images."""
        return self.fixed + self.activations(batch)

    def to_dict(self, batch: int) -> dict[str, Any]:
        """Return plain JSON values."""
        values = {f"{k}_bytes": v for k, v in asdict(self).items() if k not in ("mode", "units", "formula")}
        total = {"activations_bytes": self.activations(batch), "total_bytes": self.total(batch)}
        derived = None if self.formula is None else {"formula": str(self.formula), "hidden_ratio": self.formula.ratio}
        return {"mode": self.mode, "units": self.units, "derived": derived, **values, **total}


def footprints(
    model: nn.Module, size: Sequence[int], precision: Literal["fp32", "bf16", "fp16"], moments: float = 2,
    modes: Sequence[MemoryMode] = MODES, *, to_images: bool = False,
) -> list[Footprint]:  # fmt: skip
    """Count every mode for ``model``, which is not changed, and run on the CPU whatever device it is for.

    Args:
        model: on the CPU or elsewhere, in fp32; its trained parameters require gradients.
        size: (channels, height, width) of an image.
        precision: number format of the run.
        moments: fp32 numbers that optimizer and average hold for each trained weight; AdamW has two, SGD one.
        modes: those to count.
        to_images: whether gradients flow back to the images, through whatever is frozen.
    """
    dtype = DTYPES[precision]
    numbers = _numbers(model, dtype, moments)
    with FakeTensorMode() as fake, torch.random.fork_rng(devices=[]):
        twin = _twin(model, dtype, fake)
        empty = _without_blocks(twin)
        rest = None if empty is None else _per_image(empty, size, dtype, to_images)[0]
        return [_count(twin, mode, size, dtype, rest, numbers, to_images) for mode in modes]


def join_footprints(found: Sequence[Footprint], shared: Sequence[int]) -> Footprint:
    """Return what a step of several tasks takes that holds as many images of each.

    Args:
        found: of each task alone, in one mode.
        shared: bytes of the weights that each has in common with the first, which are there once.
    """
    first = found[0]
    if len(found) == 1:
        return first
    names = ("image", "constant", "working", "weights", "gradients", "optimizer")
    total = {name: sum(getattr(f, name) for f in found) for name in names}
    return Footprint(
        first.mode, units=first.units, formula=first.formula, **{**total, "weights": total["weights"] - sum(shared[1:])}
    )


def _count(
    twin: nn.Module, mode: MemoryMode, size: Sequence[int], dtype: torch.dtype, rest: int | None,
    numbers: dict[str, int], to_images: bool,
) -> Footprint:  # fmt: skip
    apply_memory_mode(twin, mode)
    image, constant = _per_image(twin, size, dtype, to_images)
    tokens, width, working = _widths(twin, size, dtype)
    units = formula = None
    if rest is not None and tokens:
        formula = kept_units(twin, dtype)
        units = (image - rest) / (tokens * width * len(twin.blocks) * dtype.itemsize)  # type: ignore[arg-type]
    return Footprint(mode, image, constant, units, working, **numbers, formula=formula)


def _numbers(model: nn.Module, dtype: torch.dtype, moments: float) -> dict[str, int]:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    casts = trained * dtype.itemsize if dtype != torch.float32 else 0
    weights = 4 * trained + casts + frozen * dtype.itemsize + buffers
    return {"weights": weights, "gradients": 4 * trained, "optimizer": round(4 * moments * trained)}


def _twin(model: nn.Module, dtype: torch.dtype, fake: FakeTensorMode) -> nn.Module:
    """Return a copy whose tensors have no contents: parameters and buffers are replaced while it is copied."""
    memo: dict[int, Any] = {}
    for tensor in tensors_of(model):
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        blank = torch.empty(tensor.shape, dtype=kind, device="cpu")
        memo[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
    for module in model.modules():  # casts of an earlier step, which a copy could not take
        memo.update({id(v): None for v in module.__dict__.values() if isinstance(v, Tensor)})
    twin: nn.Module = copy.deepcopy(model, memo)
    for module in twin.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    train_mode(twin)
    remove_memory_mode(twin)
    return twin


def _without_blocks(twin: nn.Module) -> nn.Module | None:
    if not _in_a_row(twin):
        return None
    empty = copy.copy(twin)
    through = _Through()
    blocks = nn.Sequential(through) if isinstance(twin.blocks, nn.Sequential) else nn.ModuleList([through])
    empty._modules = {**twin._modules, "blocks": blocks}
    return empty


class _Through(nn.Module):
    """In place of all blocks: its result needs a gradient, as theirs does, so that what is behind keeps as much."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x if x.requires_grad else x.detach().requires_grad_()


def _in_a_row(model: nn.Module) -> bool:
    """Tell whether a model has ``blocks`` that follow each other and map tokens to tokens."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.Sequential, nn.ModuleList)) or not len(blocks):
        return False
    return isinstance(blocks, nn.Sequential) or all(map(is_block, blocks))


def _per_image(model: nn.Module, size: Sequence[int], dtype: torch.dtype, to_images: bool) -> tuple[int, int]:
    """Return the bytes kept per image and the bytes kept once."""
    owned = tensors_of(model)
    one, two = (
        kept_bytes(lambda b=batch: model(torch.empty(b, *size, dtype=dtype, requires_grad=to_images)), owned)  # type: ignore[misc]
        for batch in (2, 3)
    )
    return two - one, max(0, one - 2 * (two - one))


def _widths(model: nn.Module, size: Sequence[int], dtype: torch.dtype) -> tuple[int, int, int]:
    """Return tokens, C, and the bytes per image that the backward of the widest layer works with."""
    seen: list[Tensor] = []
    widest = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            widest = max(widest, module.out_features, module.in_features)
        elif isinstance(module, SwiGLU):  # gate and value are two layers
            widest = max(widest, 2 * module.fc2.in_features)
    if _in_a_row(model):
        blocks: Any = model.blocks
        hook = blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            model(torch.empty(2, *size, dtype=dtype))
        hook.remove()
    if not seen or seen[0].ndim != 3:
        return 0, 0, 0
    tokens, width = seen[0].shape[1:]
    # the hidden layer, its gradient and that of GELU's output; the residual's gradient and the input computed again
    return tokens, width, tokens * (3 * widest + 2 * width) * dtype.itemsize


def kept_bytes(run: Callable[[], Any], owned: Iterable[Tensor]) -> int:
    """Return the bytes that ``run`` keeps for backward, every storage counted once, real or fake.

    Args:
        run: computes something with a graph; its result is held until the count is done.
        owned: tensors that exist anyway (parameters and buffers) and do not count.
    """
    known = {t.untyped_storage()._cdata for t in owned}
    seen: dict[int, tuple[int, Tensor]] = {}  # the tensor is held, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                seen.setdefault(storage._cdata, (storage.nbytes(), tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(nbytes for nbytes, _ in seen.values())


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of ``model``."""
    return [*model.parameters(), *model.buffers()]
