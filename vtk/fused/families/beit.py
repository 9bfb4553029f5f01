"""timm's Beit: BEiT and BEiT v2."""

from typing import Any

from timm.models import beit
from torch import Tensor, nn

from vtk.fused.attention_parts import READERS, AttentionParts, common_parts, packed_parts
from vtk.fused.checks import is_exactly
from vtk.fused.embed import TokenParts
from vtk.fused.families.reader import Reader
from vtk.fused.fold import Branch, fold_attention, fold_mlp
from vtk.fused.head import HeadParts
from vtk.fused.norms import refusal
from vtk.fused.stages import Stage


class BeitReader(Reader):
    """Reads models of BEiT's blocks, whose scores have a bias of relative positions, of each block or of the model."""

    kind = beit.Beit
    forwards = ("forward", "forward_features", "forward_head")
    blocks = nn.ModuleList
    silent = ("pos_drop", "head_drop")

    def token_parts(self, model: Any) -> TokenParts:
        """Return what the tokens are made of."""
        return TokenParts(model.patch_embed, [model.cls_token], model.pos_embed, 1, False, nn.Identity())

    def head_parts(self, model: Any) -> HeadParts:
        """Return what the logits are made of."""
        return HeadParts(model.norm, model.global_pool, model.num_prefix_tokens, False, None, model.fc_norm, model.head)

    def stages(self, model: Any, i: int, like: Tensor, *, ffn: bool = True) -> list[Stage]:
        """Fold block ``i``; see `Reader.stages`."""
        block, where = model.blocks[i], f"blocks.{i}"
        if not is_exactly(block, beit.Block):
            raise refusal(where, block, "only BEiT's own Block is known here")
        attention = Branch(block, where, ("norm1", "attn", "gamma_1", "drop_path1"))
        mlp = Branch(block, where, ("norm2", "mlp", "gamma_2", "drop_path2"))
        return [
            fold_attention([attention], like, shared_bias=model.rel_pos_bias),
            *([fold_mlp([mlp], like)] if ffn else []),
        ]


def _read_attention(attn: Any, like: Tensor, where: str) -> AttentionParts:
    own = [] if attn.relative_position_bias_table is None else [attn]
    return AttentionParts(**packed_parts(attn, like, where), **common_parts(attn, like, where), biases=own)


READERS[beit.Attention] = _read_attention
