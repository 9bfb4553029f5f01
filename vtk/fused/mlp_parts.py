"""Reads timm's FFNs: two layers, or two layers of which the first is gated (GLU; Shazeer 2020)."""

from dataclasses import dataclass
from typing import Any

from timm.layers import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from vtk.fused.attention_parts import Linear, Norm
from vtk.fused.batch_norms import fold_token_norm
from vtk.fused.checks import check_silent, is_exactly, is_identity
from vtk.fused.norms import read_linear, read_norm, refusal


@dataclass(frozen=True)
class MlpParts:
    """An FFN, read: ``out(norm(act(fc1(x))))``, or ``out(norm(act(gate(x)) · fc1(x)))``.

    Attributes:
        fc1: (F, C), (F).
        out: (C, F), (C).
        act: of the hidden layer, or of its gate.
        gate: (F, C), (F), None for a plain FFN.
        sub_norm: of the hidden layer.
    """

    fc1: Linear
    out: Linear
    act: nn.Module
    gate: Linear | None = None
    sub_norm: Norm | None = None


def read_mlp(mlp: Any, like: Tensor, where: str) -> MlpParts:
    """Read timm's Mlp, GluMlp (also as SwiGLUPacked) or SwiGLU, also with Context Broadcasting attached.

    Args:
        mlp: the module.
        like: device and dtype of the result.
        where: its name in the model, for messages.

    Raises:
        UsageError: a module or a part of one that is not known.
    """
    plain, packed, split = (is_exactly(mlp, kind) for kind in (Mlp, GluMlp, SwiGLU))
    if not (plain or packed or split):
        raise refusal(where, mlp, "only timm's Mlp, GluMlp and SwiGLU are known here")
    check_silent(mlp, where, "drop1", "drop2")
    out = read_linear(mlp.fc2, like, f"{where}.fc2")
    sub_norm = None if is_identity(mlp.norm) else read_norm(mlp.norm, like, f"{where}.norm")
    if split:
        gate, fc1 = (read_linear(getattr(mlp, name), like, f"{where}.{name}") for name in ("fc1_g", "fc1_x"))
        return MlpParts(fc1, out, mlp.act, gate, sub_norm)
    weight, bias = read_linear(mlp.fc1, like, f"{where}.fc1")
    if plain:
        act, weight, bias = fold_token_norm(mlp.act, weight, bias)
        return MlpParts((weight, bias), out, act, None, sub_norm)
    if mlp.chunk_dim != -1:
        raise refusal(where, mlp, "it gates images and not tokens (use_conv)")
    first, second = zip(weight.chunk(2), bias.chunk(2), strict=True)
    gate, fc1 = (second, first) if mlp.gate_last else (first, second)
    return MlpParts(fc1, out, mlp.act, gate, sub_norm)
