"""timm's VisionTransformer: ViT, DeiT, DINOv2, SigLIP, AIMv2 and others; DeiT with a distillation token, too."""

from typing import Any

import timm.models.vision_transformer as vit
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vtk.fused.blocks import fold_block
from vtk.fused.embed import TokenParts
from vtk.fused.families.reader import Reader
from vtk.fused.head import HeadParts
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


class DistilledReader(VisionTransformerReader):
    """Reads DeiT with two tokens before the patches, each with a head, whose logits are averaged."""

    kind = VisionTransformerDistilled

    def token_parts(self, model: Any) -> TokenParts:
        """Return what the tokens are made of."""
        return TokenParts(
            model.patch_embed, [model.cls_token, model.dist_token], model.pos_embed,
            0 if model.no_embed_class else model.num_prefix_tokens, bool(model.dynamic_img_size), model.norm_pre,
        )  # fmt: skip

    def head_parts(self, model: Any) -> HeadParts:
        """Return what the logits are made of: the mean of both heads'."""
        heads = (model.head, model.head_dist)
        return HeadParts(model.norm, "tokens", model.num_prefix_tokens, True, None, nn.Identity(), heads)
