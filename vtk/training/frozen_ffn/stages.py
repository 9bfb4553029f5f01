"""The two stages of a block while it trains with frozen norms and FFN: x + attention, and x + FFN.

Between them addition and norm are one pass over the tokens. Modules that draw random numbers are called in timm's
order: the same seed drops the same paths.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vtk.models.transforms.context_broadcast import ContextBroadcast
from vtk.training.frozen_ffn import parts
from vtk.training.frozen_ffn.attend import attend
from vtk.training.frozen_ffn.context import Each, whole
from vtk.training.frozen_ffn.feed import feed
from vtk.training.frozen_ffn.handover import close_block, open_block
from vtk.training.frozen_ffn.norm import add_normalise, normalise
from vtk.training.frozen_ffn.parts import Branch, NormForm, Positions
from vtk.training.frozen_ffn.rules import BlockModes


def both_stages(block: Any, x: Tensor, positions: Positions) -> Tensor:
    """Return what a block whose memory mode was chosen makes of tokens (B, N, C)."""
    same = x.dtype == _dtype(x)
    r = _attention(block, x, open_block(x), positions)
    normed = {}
    if same and r.dtype == x.dtype:
        form = parts.norm_form(parts.ffn_branches(block)[0].norm)
        x, normed[form] = add_normalise(x, r, form)
    else:
        x = x + r
    return close_block(block, x, _ffn(block, x, whole, normed), same=same)


def attention_stage(block: Any, x: Tensor, positions: Positions | None = None) -> Tensor:
    """Return x + attention of tokens (B, N, C), for a block whose memory mode was chosen."""
    return x + _attention(block, x, {}, positions or Positions())


def _attention(block: Any, x: Tensor, normed: dict[NormForm, Tensor], positions: Positions) -> Tensor:
    modes: BlockModes = block.memory_modes

    def branch(one: Branch, x_hat: Tensor) -> Tensor:
        return attend(one, x_hat, modes, positions)

    return _residual(block, parts.attention_branches(block), getattr(block, "cb_msa", None), x, branch, whole, normed)


def ffn_stage(block: Any, x: Tensor, each: Each) -> Tensor:
    """Return x + FFN of tokens (B, N, C), for a block whose memory mode was chosen.

    Args:
        block: the block.
        x: the tokens, also (1, T, C) of many images.
        each: applies stochastic depth and Context Broadcasting to ``x`` image by image.
    """
    return x + _ffn(block, x, each, {})


def _ffn(block: Any, x: Tensor, each: Each, normed: dict[NormForm, Tensor]) -> Tensor:
    modes: BlockModes = block.memory_modes

    def branch(one: Branch, x_hat: Tensor) -> Tensor:
        return feed(one, x_hat, modes, each)

    return _residual(block, parts.ffn_branches(block), getattr(block, "cb", None), x, branch, each, normed)


def _dtype(x: Tensor) -> torch.dtype:
    """Return the type of the layers behind a norm of ``x``; autocast leaves fp64 alone."""
    cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if cast else x.dtype


def _residual(
    block: Any, branches: Sequence[Branch], context: ContextBroadcast | None, x: Tensor,
    run: Callable[[Branch, Tensor], Tensor], each: Each, normed: dict[NormForm, Tensor],
) -> Tensor:  # fmt: skip
    """Return what is added to ``x``; branches share what is ``normed``, by its form, so that it is kept once."""
    outs = []
    for branch in branches:
        form = parts.norm_form(branch.norm)
        if form not in normed:
            normed[form] = normalise(x, form, _dtype(x))
        y = branch.scaled(run(branch, normed[form]))
        outs.append(y if isinstance(branch.drop_path, nn.Identity) else each(branch.drop_path, y))
    total = torch.stack(outs).sum(dim=0) if hasattr(block, "attns") else outs[0]
    return total if context is None else each(context, total)
