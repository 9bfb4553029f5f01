"""timm's VisionTransformerDistilled: DeiT with a distillation token, whose head and that of the class are averaged."""

from typing import Any

from timm.models.deit import VisionTransformerDistilled
from torch import nn

from vtk.fused.embed import HeadParts, TokenParts
from vtk.fused.families.vision_transformer import VisionTransformerReader


class DistilledReader(VisionTransformerReader):
    """Reads models with two tokens before the patches, each with a head."""

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
