"""timm's Eva: EVA-02, DINOv3, Perception Encoder, ViTs with rotary embeddings, Sapiens2."""

from typing import Any

from timm.layers import PatchDropoutWithIndices
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from vtk.fused.checks import check_silent, is_exactly
from vtk.fused.families.reader import Reader
from vtk.fused.families.vision_transformer import VisionTransformerReader
from vtk.fused.fold import Branch, fold_attention, fold_mlp
from vtk.fused.head import HeadParts
from vtk.fused.norms import POST_NORM, refusal
from vtk.fused.rotary import Rotary
from vtk.fused.stages import Stage


class EvaReader(Reader):
    """Reads models of `EvaBlock`, with rotary tables of one angle a token, or of each block and head."""

    kind = Eva
    blocks = nn.ModuleList
    silent = ("pos_drop", "head_drop")  # and patch_drop, which may be None

    token_parts = VisionTransformerReader.token_parts

    def head_parts(self, model: Any) -> HeadParts:
        """Return what the logits are made of; attention that pools reads the prefix tokens too."""
        pools = model.attn_pool is not None
        return HeadParts(
            model.norm, model.global_pool, model.num_prefix_tokens, pools, model.attn_pool, model.fc_norm, model.head
        )

    def check(self, model: Any) -> None:
        """Refuse what computes something else; see `Reader.check`."""
        super().check(model)
        if model.patch_drop is not None and type(model.patch_drop) is not PatchDropoutWithIndices:
            check_silent(model, "", "patch_drop")

    def rotary(self, model: Any, like: Tensor) -> Rotary | None:
        """Return the model's rotary tables, None where it has learned positions alone."""
        if model.rope is None:
            return None
        return Rotary(
            model.rope, like,
            grid=tuple(model.patch_embed.grid_size), dynamic=bool(model.dynamic_img_size),
            rotate_half=bool(getattr(model.blocks[0].attn, "rotate_half", False)),
            prefix=model.num_prefix_tokens, per_block=bool(getattr(model, "rope_mixed", False)),
        )  # fmt: skip

    def stages(self, model: Any, i: int, like: Tensor, *, ffn: bool = True) -> list[Stage]:
        """Fold block ``i``; see `Reader.stages`."""
        return fold_eva_block(model, i, like, ffn=ffn, per_block=bool(getattr(model, "rope_mixed", False)))


def fold_eva_block(model: Any, i: int, like: Tensor, *, ffn: bool, per_block: bool) -> list[Stage]:
    """Fold an `EvaBlock` of a model; ``per_block`` says whether each block has rotary tables of its own.

    Raises:
        UsageError: a part that is not known.
    """
    block, where = model.blocks[i], f"blocks.{i}"
    if is_exactly(block, EvaBlockPostNorm):
        raise refusal(where, block, POST_NORM)
    if not is_exactly(block, EvaBlock):
        raise refusal(where, block, "only timm's EvaBlock is known here")
    table = None
    if model.rope is not None:
        table = i if per_block else 0
        _check_rotation(model, block.attn, f"{where}.attn")
    attention = Branch(block, where, ("norm1", "attn", "gamma_1", "drop_path1"))
    mlp = Branch(block, where, ("norm2", "mlp", "gamma_2", "drop_path2"))
    return [fold_attention([attention], like, rotary=table), *([fold_mlp([mlp], like)] if ffn else [])]


def _check_rotation(model: Any, attn: Any, where: str) -> None:
    first = model.blocks[0].attn
    if attn.num_prefix_tokens != model.num_prefix_tokens:
        raise refusal(where, attn, f"it leaves {attn.num_prefix_tokens} tokens unrotated, of a model with "
                      f"{model.num_prefix_tokens} before its patches")  # fmt: skip
    if getattr(attn, "rotate_half", False) != getattr(first, "rotate_half", False):
        raise refusal(where, attn, "it rotates other pairs of channels than the first block")
