"""Derives the units that a block keeps for backward from the hidden ratio ρ = F / C, beside autograd's own count.

    constant + slope · ρ + statistics,    in units of C elements per token

    frozen FFN      plain ρ (2ρ with CLIP's GELU), gated 3ρ: gate, value, SiLU(gate); a norm of the hidden layer + ρ
    trained FFN     + its input, + the input of fc2: 1 + ρ
    attention       queries, keys and values 1 + 2 Hkv / H, output 1; + 1 for a norm behind it, + 2 for a gate
    norms           1 each; their statistics and logsumexp are 4 bytes a row

Nothing is derived for what has dropout, LoRA factors, Context Broadcasting, or relative positions run by torch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vtk.models.transforms.context_broadcast import find_context_broadcast
from vtk.training.frozen_ffn import parts
from vtk.training.frozen_ffn.low_rank import is_lora
from vtk.training.frozen_ffn.parts import FfnLayers
from vtk_kernels.row_stats import pieces_of


@dataclass(frozen=True)
class KeptUnits:
    """Units of C elements that a block keeps per token.

    Attributes:
        constant: part that does not depend on ρ.
        slope: of ρ.
        ratio: ρ, the width of the FFN's hidden layer over C.
        statistics: of norms and attention's rows.
    """

    constant: float
    slope: float
    ratio: float
    statistics: float

    @property
    def total(self) -> float:
        """Units, all parts together."""
        return self.constant + self.slope * self.ratio + self.statistics

    def __str__(self) -> str:
        constant = f"{self.constant:.3g}"
        if not self.slope:
            return constant
        slope = "" if self.slope == 1 else f"{self.slope:.3g}"
        return f"{constant} + {slope}ρ"


def kept_units(model: Any, dtype: torch.dtype) -> KeptUnits | None:
    """Return the mean over the blocks of a model, as they would train now; None where it is not derived.

    Args:
        model: with ``blocks`` and their memory modes.
        dtype: of tokens and weights.
    """
    rope = getattr(model, "rope", None)
    shared = any(getattr(model, name, None) is not None for name in ("rel_pos_bias", "shared_rel_pos"))
    if shared and any("memory_modes" not in block.__dict__ for block in model.blocks):
        return None
    found = [_block(block, dtype, rope) for block in model.blocks]
    units = [one for one in found if one is not None]
    if not units or len(units) < len(found):
        return None
    rows = [(u.constant, u.slope, u.ratio, u.statistics) for u in units]
    return KeptUnits(*(sum(column) / len(units) for column in zip(*rows, strict=True)))


def _block(block: Any, dtype: torch.dtype, rope: nn.Module | None) -> KeptUnits | None:
    if not parts.is_block(block) or any(find_context_broadcast(m) for m in block.modules()):
        return None
    if any(map(is_lora, block.modules())):
        return None
    modes = block.__dict__.get("memory_modes")
    attns, ffns = parts.attention_branches(block), parts.ffn_branches(block)
    if not all(hasattr(b.module, "drop1") for b in ffns):
        return None
    layers = [parts.ffn_layers(b.module) for b in ffns]
    drops = [d for b in attns for d in (b.module.attn_drop, b.module.proj_drop)]
    drops += [d for b in ffns for d in (b.module.drop1, b.module.drop2)]
    first = layers[0]
    if first is None or any(d.p > 0 for d in drops) or any(one is None or one.activation is None for one in layers):
        return None
    if modes is None and rope is not None and _trained(rope):
        return None
    width = first.second.out_features
    ratio = first.second.in_features / width
    # norms of one form are one, where the engine runs them
    stages = [[b.norm for b in attns], [b.norm for b in ffns]]
    norms = sum(len({parts.norm_form(n) for n in stage}) if modes else len(stage) for stage in stages)
    rows = norms
    constant, slope = float(norms), 0.0
    for branch in attns:
        units = _attention(branch.module, width, modes, rope is not None)
        if units is None or (modes is None and parts.norm_form(branch.norm).rms):
            return None
        constant += units
        rows += branch.module.num_heads
        if modes is None and any(_trained(layer) for layer in parts.projections(branch.module)):
            constant += 1  # the result of a norm that torch runs
    for one in layers:
        assert one is not None
        slope += _ffn(one, "plain" if modes is None else modes.ffn, dtype)
        if modes is None:
            constant += any(_trained(layer) for layer in one.first)
            slope += _trained(one.second)
        rows += one.norm is not None and (modes is None or modes.ffn != "recompute")
    constant += sum(_scale_trained(b.scale) for b in attns + ffns)
    return KeptUnits(constant, slope, ratio, 4 * rows / (width * dtype.itemsize))


def _attention(attn: Any, width: int, modes: Any, rotated: bool) -> float | None:
    inner = attn.proj.in_features / width
    behind = inner * (2 * (getattr(attn, "gate", None) is not None) + _there(getattr(attn, "norm", None)))
    if modes is not None and modes.qkv_again:
        return inner + behind
    share = parts.kv_heads(attn) / attn.num_heads
    changed = any(_there(getattr(attn, name, None)) for name in ("q_norm", "k_norm"))
    special = changed or rotated or share < 1 or parts.has_score_bias(attn)
    if modes is not None and (special or attn.fused_attn) and modes.attends:
        return inner * (2 + 2 * share) + behind
    if modes is not None or parts.has_score_bias(attn) or not attn.fused_attn:
        return None
    # torch's autograd keeps a packed projection as a whole, beside it what norms and rotation make of queries and keys,
    # and then attention's output twice: its heads lie the other way round in memory
    whole = 3.0 if len(parts.projections(attn)) == 1 else 1.0 + (1 + share if changed or not rotated else 0)
    return inner * (whole + (3 if changed or rotated else 0) + 1) + behind


def _ffn(layers: FfnLayers, kept: str, dtype: torch.dtype) -> float:
    """Return the multiple of ρ that a frozen FFN keeps."""
    if kept == "recompute":
        return 0.0
    norm = 1.0 if layers.norm is not None else 0.0
    if kept == "bytes":
        features = layers.second.in_features
        each = 2 + 8 * pieces_of(features) / features if layers.gated else 1
        return each / dtype.itemsize + norm
    activation = 2 if layers.activation == "quick_gelu" else 1
    return activation + 2.0 * layers.gated + norm


def _there(module: Any) -> bool:
    return not isinstance(module, (nn.Identity, type(None)))


def _trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _scale_trained(scale: Any) -> bool:
    if isinstance(scale, torch.Tensor):
        return scale.requires_grad
    return scale is not None and _trained(scale)
