"""Converts tensors under the names of Meta's DINOv3 code to those of timm's ``Eva``.

Differences, from the names in its state dicts: one ``qkv.bias``, multiplied by ``qkv.bias_mask`` (zeros for the keys),
where timm has ``q_bias`` and ``v_bias`` (models ``…_qkvb``) or no bias; ``storage_tokens`` are registers; ``ls1.gamma``
is ``gamma_1``; the SwiGLU's ``w1``, ``w2`` and ``w3`` are gate, value and output; ``rope_embed.periods`` are stored,
rounded to bf16, where timm computes them.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.eva import Eva
from torch import Tensor, nn

from vtk.errors import DataError

_OWN = re.compile(r"(?:backbone\.)?blocks\.0\.ls1\.gamma")
_BIAS = re.compile(r"(blocks\.\d+\.attn)\.qkv\.bias")
_MASK = re.compile(r"blocks\.\d+\.attn\.qkv\.bias_mask")
_WHOLE = {"storage_tokens": "reg_token"}
_PARTS = (
    (re.compile(r"(blocks\.\d+)\.ls([12])\.gamma"), r"\1.gamma_\2"),
    (re.compile(r"(blocks\.\d+\.mlp)\.w1\b"), r"\1.fc1_g"),
    (re.compile(r"(blocks\.\d+\.mlp)\.w2\b"), r"\1.fc1_x"),
    (re.compile(r"(blocks\.\d+\.mlp)\.w3\b"), r"\1.fc2"),
    (re.compile(r"(blocks\.\d+\.mlp)\.w12\b"), r"\1.fc1"),
)
_PERIODS = "rope_embed.periods"
_ROUNDED, _EXACT = 2**-8, 1e-6
"""Relative differences of periods: within one rounding to bf16, and within that of computing them in fp32."""


def is_dinov3(keys: Iterable[str], model: nn.Module) -> bool:
    """Return whether state-dict keys are those of Meta's DINOv3 code, and timm's model is of its kind."""
    return isinstance(model, Eva) and any(_OWN.fullmatch(key) for key in keys)


def convert(
    tensors: Mapping[str, Tensor], model: nn.Module, name: str, path: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under timm's keys, and notes for the user; names that timm has no place for are kept.

    Args:
        tensors: of the file; a checkpoint of training has them under ``backbone.``.
        model: timm's model, whose tensors may be on the meta device.
        name: timm model name.
        path: of the file, for messages.

    Raises:
        DataError: biases or rotary periods that timm's model cannot have, or one tensor under two names.
    """
    clean = {key.removeprefix("backbone."): value for key, value in tensors.items()}
    notes = _check_periods(clean.pop(_PERIODS, None), model, name, path)
    wanted = model.state_dict().keys()
    result: dict[str, Tensor] = {}
    for key, value in clean.items():
        match = _BIAS.fullmatch(key)
        if match and f"{match[1]}.qkv.weight" in wanted:
            result |= _split_bias(match[1], value, clean.get(f"{key}_mask"), wanted, name, path)
        elif not _MASK.fullmatch(key) and value.numel():  # without registers there is a table of none
            new = _WHOLE.get(key, key)
            for pattern, target in _PARTS:
                new = pattern.sub(target, new)
            if new in result:
                raise DataError(f"{path} has `{new}` twice, under two names; give the file of Meta as it was published")
            result[new] = value
    for key in wanted:
        leaf = key.rpartition(".")[2]
        weight = clean.get(f"{key.removesuffix(leaf)}qkv.weight")
        if leaf in ("q_bias", "v_bias") and key not in result and weight is not None:  # the file has no biases
            result[key] = weight.new_zeros(weight.shape[0] // 3)
    return result, notes


def _split_bias(
    attn: str, bias: Tensor, mask: Tensor | None, wanted: Iterable[str], name: str, path: Path
) -> dict[str, Tensor]:
    """Return the biases of queries and values of one attention; those of the keys must have no effect."""
    where = f"{path}: `{attn}.qkv.bias`"
    if mask is not None:
        if mask.shape != bias.shape or not bool(((mask == 0) | (mask == 1)).all()):
            raise DataError(
                f"{where} has a `bias_mask` of other values than 0 and 1, or of another shape; save the state dict of "
                "a model whose weights were loaded"
            )
        bias = torch.where(mask == 0, torch.zeros_like(bias), bias)
    if bias.ndim != 1 or bias.shape[0] % 3:
        raise DataError(f"{where} has shape {tuple(bias.shape)}, which is not one vector for q, k and v")
    q, k, v = bias.chunk(3)
    if bool(k.ne(0).any()):
        raise DataError(
            f"{where} has biases of the keys that are not masked, and timm's DINOv3 has none; give the file of Meta or "
            "of transformers as it was published"
        )
    keys = (f"{attn}.q_bias", f"{attn}.v_bias")
    if keys[0] in wanted:
        return dict(zip(keys, (q, v), strict=True))
    if bool(bias.ne(0).any()):
        other = f"{name.split('.')[0]}_qkvb"
        use = f"use --model {other}" if timm.is_model(other) else "use a model with biases of q and v (…_qkvb)"
        raise DataError(f"{where} is not zero, and `{name}` has no biases of q and v; {use}")
    return {}


def _check_periods(periods: Tensor | None, model: Any, name: str, path: Path) -> list[str]:
    """Compare stored rotary periods with those that timm computes; return a note where they were rounded."""
    if periods is None:
        return []
    rope = model.rope
    quarter, base = getattr(rope, "dim", 0) // 4, getattr(rope, "temperature", None)
    if base is None or periods.shape != (quarter,):
        raise DataError(
            f"{path}: `{_PERIODS}` has shape {tuple(periods.shape)}, and the rotary embedding of `{name}` "
            f"{quarter} periods; is --model right, and its num_heads?"
        )
    own = float(base) ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    worst = float((periods.double() / own - 1).abs().max()) if quarter else 0.0
    if not worst <= _ROUNDED:
        raise DataError(
            f"{path}: `{_PERIODS}` differs from that of `{name}` by {100 * worst:.2g} %, so its rotary embedding has "
            "another base; give it with --model-kwargs rope_temperature=NUMBER"
        )
    if worst <= _EXACT:
        return []
    return [
        f"`{_PERIODS}` of {path.name} is rounded (by up to {100 * worst:.2g} %); timm computes the periods in fp32, so "
        "features differ a little from those of Meta's code"
    ]
