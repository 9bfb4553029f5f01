"""Checks whether a model's parts can be run separately, in the order of timm's VisionTransformer."""

import timm.models.vision_transformer as vit
from torch import nn

EXAMPLES = "such as vit_small_patch16_224, deit3_small_patch16_224 or vit_small_patch14_dinov2"
"""Models of timm's VisionTransformer; its Eva has names that begin with vit_, too."""
_FORWARDS = ("forward", "forward_features", "forward_head", "_pos_embed", "pool")


def unusual_part(model: nn.Module) -> str | None:
    """Return why a model's parts (stem, positions, blocks, norm, head) cannot be run separately; None if they can.

    A subclass of timm's VisionTransformer may compute more between the parts, so it must have timm's own methods.
    """
    kind = type(model)
    if not isinstance(model, vit.VisionTransformer) or type(model.blocks) is not nn.Sequential:
        return f"{kind.__name__} is not timm's VisionTransformer ({EXAMPLES})"
    for name in _FORWARDS:
        if getattr(kind, name) is not getattr(vit.VisionTransformer, name):
            return f"{kind.__name__} has its own `{name}`"
    return None
