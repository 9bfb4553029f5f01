"""timm's VisionTransformerRelPos: relative positions from a table or a small network, of each block or shared."""

from typing import Any

import timm.models.vision_transformer_relpos as relpos
from torch import Tensor, nn

from vtk.fused.attention_parts import READERS, AttentionParts, common_parts, packed_parts
from vtk.fused.checks import is_exactly
from vtk.fused.embed import TokenParts
from vtk.fused.families.reader import Reader
from vtk.fused.fold import Branch, fold_attention, fold_mlp
from vtk.fused.head import HeadParts
from vtk.fused.norms import POST_NORM, refusal
from vtk.fused.stages import Stage


class RelPosReader(Reader):
    """Reads models of `RelPosBlock`."""

    kind = relpos.VisionTransformerRelPos
    forwards = ("forward", "forward_features", "forward_head")
    blocks = nn.ModuleList
    silent = ("head_drop",)

    def token_parts(self, model: Any) -> TokenParts:
        """Return what the tokens are made of; none has a position of its own."""
        prefix = [] if model.cls_token is None else [model.cls_token]
        return TokenParts(model.patch_embed, prefix, None, 0, False, nn.Identity())

    def head_parts(self, model: Any) -> HeadParts:
        """Return what the logits are made of."""
        return HeadParts(model.norm, model.global_pool, model.num_prefix_tokens, False, None, model.fc_norm, model.head)

    def stages(self, model: Any, i: int, like: Tensor, *, ffn: bool = True) -> list[Stage]:
        """Fold block ``i``; see `Reader.stages`."""
        block, where = model.blocks[i], f"blocks.{i}"
        if is_exactly(block, relpos.ResPostRelPosBlock):
            raise refusal(where, block, POST_NORM)
        if not is_exactly(block, relpos.RelPosBlock):
            raise refusal(where, block, "only timm's RelPosBlock is known here")
        attention = Branch(block, where, ("norm1", "attn", "ls1", "drop_path1"))
        mlp = Branch(block, where, ("norm2", "mlp", "ls2", "drop_path2"))
        shared = model.shared_rel_pos if block.attn.rel_pos is None else None  # a block's own stands in place of it
        return [fold_attention([attention], like, shared_bias=shared), *([fold_mlp([mlp], like)] if ffn else [])]


def _read_attention(attn: Any, like: Tensor, where: str) -> AttentionParts:
    own = [] if attn.rel_pos is None else [attn.rel_pos]
    return AttentionParts(**packed_parts(attn, like, where), **common_parts(attn, like, where), biases=own)


READERS[relpos.RelPosAttention] = _read_attention
