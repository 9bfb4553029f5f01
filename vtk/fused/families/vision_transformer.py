"""timm's VisionTransformer: ViT, DeiT, DINOv2, SigLIP, AIMv2 and others."""

from typing import Any

import timm.models.vision_transformer as vit
from torch import Tensor

from vtk.fused.blocks import fold_block
from vtk.fused.embed import HeadParts, TokenParts
from vtk.fused.families.reader import Reader
from vtk.fused.stages import Stage


class VisionTransformerReader(Reader):
    """Reads models of `Block`, `ParallelThingsBlock` and `ParallelScalingBlock`."""

    kind = vit.VisionTransformer

    def token_parts(self, model: Any) -> TokenParts:
        """Return what the tokens are made of."""
        prefix = [t for t in (model.cls_token, model.reg_token) if t is not None]
        return TokenParts(
            model.patch_embed,
            prefix,
            model.pos_embed,
            0 if model.no_embed_class else model.num_prefix_tokens,
            bool(model.dynamic_img_size),
            model.norm_pre,
        )

    def head_parts(self, model: Any) -> HeadParts:
        """Return what the logits are made of."""
        return HeadParts(
            model.norm,
            model.global_pool,
            model.num_prefix_tokens,
            bool(getattr(model, "pool_include_prefix", False)),
            model.attn_pool,
            model.fc_norm,
            model.head,
        )

    def stages(self, model: Any, i: int, like: Tensor, *, ffn: bool = True) -> list[Stage]:
        """Fold block ``i``; see `Reader.stages`."""
        return fold_block(model.blocks[i], like, f"blocks.{i}", ffn=ffn)
