"""The form of attention that exporters write: a matrix each for q, k and v."""

from torch import nn

from vtk.fused.frozen import frozen
from vtk.fused.stages import AttentionStage


def separate_qkv(model: nn.Module, *, divide_scores: bool = False) -> None:
    """Give every attention of a fused model three matrices in place of a packed one, in place, for exporters.

    Args:
        model: of `fuse`.
        divide_scores: take 1/√D out of q and divide the scores by √D; not with qk-norm, whose weights hold it.
    """
    for stage in model.modules():
        if isinstance(stage, AttentionStage) and stage.w_qkv is not None:
            factor = stage.head_dim**0.5 if divide_scores and stage.qk_norm is None else None
            for name, w, b in zip("qkv", stage.w_qkv.chunk(3), stage.b_qkv.chunk(3), strict=True):
                scale = factor if name == "q" and factor is not None else 1.0
                setattr(stage, f"w_{name}", frozen(w * scale))
                setattr(stage, f"b_{name}", frozen(b * scale))
            stage.w_qkv, stage.divisor = None, factor
