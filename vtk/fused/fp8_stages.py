"""Stages of a fused model with e4m3 products: qkv and both layers of the FFN.

What is multiplied is rounded where it is made: the tokens in the norm before (`vtk_kernels.add_norm_e4m3`), the hidden
layer in GELU (`vtk_kernels.quantize_rows`). Attention and the projection behind it stay in bf16: that is a twelfth of a
block's products, its input is made by a kernel that holds no whole row, and rounding it as well made features of a real
ViT-S/14 worse by a sixth.
"""

import abc
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.attention_stage import AttentionStage
from vtk.fused.glu_stage import GluStage
from vtk.fused.mlp_stage import MlpStage, ScalingStage
from vtk.fused.rounding import round_matrix
from vtk.fused.scaled_product import ScaledMatrix, ScaledTokens, check_matrix
from vtk.fused.stages import Stage, context_mean
from vtk_kernels.quantize_rows import quantize_rows


class Fp8Stage(nn.Module, abc.ABC):
    """A stage whose wide matrices are in e4m3, once `round` was called.

    Attributes:
        stage: what it is made of, without those matrices.
    """

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.stage = stage

    @property
    def bias(self) -> Tensor:
        """The stage's (C)."""
        bias: Tensor = self.stage.bias
        return bias

    @abc.abstractmethod
    def round(self, inputs: Sequence[ScaledTokens]) -> None:
        """Round the matrices, for inputs such as these."""

    @abc.abstractmethod
    def forward(self, h: ScaledTokens, queries: int | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the stage's output (B, N', C), of the first so many tokens; ``bias`` in place of its own."""


class Fp8Attention(Fp8Stage):
    """`AttentionStage` with qkv in e4m3."""

    def __init__(self, stage: AttentionStage) -> None:
        super().__init__(stage)
        assert stage.w_qkv is not None
        self._wide, stage.w_qkv = stage.w_qkv.detach(), None
        self.qkv: ScaledMatrix

    def round(self, inputs: Sequence[ScaledTokens]) -> None:
        """Round qkv."""
        self.qkv = round_matrix(self._wide, inputs)
        del self._wide

    def forward(self, h: ScaledTokens, queries: int | None = None, bias: Tensor | None = None) -> Tensor:
        """Return attention's output; see `Fp8Stage`."""
        o = self.stage._attend_packed(self.qkv(h, self.stage.b_qkv), queries)
        return F.linear(o, self.stage.w_out, self.bias if bias is None else bias)


class Fp8Mlp(Fp8Stage):
    """`MlpStage` with both layers in e4m3."""

    def __init__(self, stage: MlpStage) -> None:
        super().__init__(stage)
        self._wide = stage.w_in.detach(), stage.w_out.detach()
        del stage.w_in, stage.w_out
        self.fc1: ScaledMatrix
        self.fc2: ScaledMatrix

    def round(self, inputs: Sequence[ScaledTokens]) -> None:
        """Round the first layer, then the second for what the rounded first one gives it."""
        first, second = self._wide
        del self._wide
        self.fc1 = round_matrix(first, inputs)
        self.fc2 = round_matrix(second, [self._hidden(h) for h in inputs])

    def forward(self, h: ScaledTokens, queries: int | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the FFN's output; see `Fp8Stage`."""
        y: Tensor = self.fc2(self._hidden(h.first(queries)), self.bias if bias is None else bias)
        return y

    def _hidden(self, h: ScaledTokens) -> ScaledTokens:
        u = self.fc1(h, self.stage.b_in)
        if self.stage.gelu and not self.stage.mid:
            return ScaledTokens(*quantize_rows(u, gelu=True))
        u = self.stage.act(u)
        return ScaledTokens(*quantize_rows(context_mean(u, self.stage.mid_scale) if self.stage.mid else u))


class Fp8Scaling(Fp8Stage):
    """`ScalingStage` of both."""

    def __init__(self, stage: ScalingStage) -> None:
        super().__init__(stage)
        self.attention, self.mlp = Fp8Attention(stage.attention), Fp8Mlp(stage.mlp)

    def round(self, inputs: Sequence[ScaledTokens]) -> None:
        """Round the matrices of both."""
        self.attention.round(inputs)
        self.mlp.round(inputs)

    def forward(self, h: ScaledTokens, queries: int | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the sum of both; see `Fp8Stage`."""
        y: Tensor = self.attention(h, queries, self.bias if bias is None else bias) + self.mlp(h, queries)
        return y


def fp8_stage(stage: Stage, where: str) -> Fp8Stage:
    """Return a stage's form in fp8; its matrices are taken away from it.

    Raises:
        UsageError: a matrix that no fp8 product takes, or a part that has no form in fp8.
    """
    check_stage(stage, where)
    if isinstance(stage, ScalingStage):
        return Fp8Scaling(stage)
    if isinstance(stage, AttentionStage):
        return Fp8Attention(stage)
    assert isinstance(stage, MlpStage)
    return Fp8Mlp(stage)


def check_stage(stage: Stage, where: str) -> None:
    """Refuse a stage that has no form in fp8, and leave it as it is.

    Raises:
        UsageError: as `fp8_stage`.
    """
    parts = (stage, *stage.children())
    for part in parts:
        _check_known(part, where)
    for part in parts:
        if isinstance(part, AttentionStage) and part.w_qkv is not None:
            check_matrix(part.w_qkv, f"{where}.qkv")
        elif isinstance(part, MlpStage):
            check_matrix(part.w_in, f"{where}.fc1")
            check_matrix(part.w_out, f"{where}.fc2")


def _check_known(part: nn.Module, where: str) -> None:
    """Refuse what the forms in fp8 would leave out.

    Raises:
        UsageError: names it.
    """
    found = {
        "a rotary embedding": getattr(part, "rotary", None) is not None,
        "gated attention": getattr(part, "w_gate", None) is not None,
        "a norm before its second layer": getattr(part, "sub_norm", None) is not None,
        "a gated FFN": isinstance(part, GluStage),
    }
    for what, there in found.items():
        if there:
            raise UsageError(f"`{where}` has {what}, which has no form in fp8; use bf16 or fp16")
