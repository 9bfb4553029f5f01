"""Hands a block's output to the next one together with the norm that it begins with.

Adding the last residual and that norm are one pass over the tokens. The norm lies beside the output, as an attribute of
that very tensor: whatever makes another tensor of it, or writes to it, makes the next block compute its own.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from vtk.training.frozen_ffn import parts
from vtk.training.frozen_ffn.norm import add_normalise
from vtk.training.frozen_ffn.parts import NormForm

_NEXT = "memory_next"


def link(model: nn.Module) -> None:
    """Tell blocks that stand in a row, all with a memory mode, what the next one begins with."""
    for row in model.modules():
        if isinstance(row, (nn.Sequential, nn.ModuleList)):
            for block, following in itertools.pairwise(row):
                if "memory_modes" in block.__dict__ and "memory_modes" in following.__dict__:
                    block.__dict__[_NEXT] = parts.norm_form(parts.attention_branches(following)[0].norm)


def unlink(block: nn.Module) -> None:
    """Undo `link`."""
    block.__dict__.pop(_NEXT, None)


def close_block(block: nn.Module, x: Tensor, r: Tensor, *, same: bool) -> Tensor:
    """Return x + r, with its norm beside it where the next block wants it.

    Args:
        block: that ends.
        x: (B, N, C).
        r: like ``x``.
        same: whether what is behind the norm has the type of ``x``.
    """
    form: NormForm | None = block.__dict__.get(_NEXT)
    if form is None or not same or r.dtype != x.dtype or torch.compiler.is_compiling() or _checkpointing():
        return x + r
    y, x_hat = add_normalise(x, r, form)
    left: Any = y
    left.vtk_normed = (y._version, {form: x_hat})
    return y


def open_block(x: Tensor) -> dict[NormForm, Tensor]:
    """Return what is known of the norm of a block's input, by its form."""
    if torch.compiler.is_compiling():
        return {}
    version, normed = getattr(x, "vtk_normed", (None, {}))
    return dict(normed) if version == x._version else {}


def _checkpointing() -> bool:
    """Tell whether this block will be computed again in backward: nothing it leaves beside its output may be kept."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and str(getattr(hooks[0], "__module__", "")) == "torch.utils.checkpoint"
