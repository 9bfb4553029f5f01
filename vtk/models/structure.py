"""Whether a model is a Vision Transformer whose parts can be run one by one, as timm's own forward pass does."""

import timm.models.vision_transformer as vit
from torch import nn

_FORWARDS = ("forward", "forward_features", "forward_head", "_pos_embed", "pool")


def unusual_part(model: nn.Module) -> str | None:
    """Return why the parts of a model may not be run one by one: stem, positions, blocks, norm, head; None if they may.

    A subclass of timm's VisionTransformer may do more between the parts, so that only its own methods are trusted.
    """
    kind = type(model)
    if not isinstance(model, vit.VisionTransformer) or type(model.blocks) is not nn.Sequential:
        return f"{kind.__name__} is not timm's VisionTransformer (vit_*, deit_*, deit3_*)"
    for name in _FORWARDS:
        if getattr(kind, name) is not getattr(vit.VisionTransformer, name):
            return f"{kind.__name__} has its own `{name}`"
    return None
