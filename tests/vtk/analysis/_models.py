"""Small models and batches for the diagnostics' tests."""

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

SMALL = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 2, "num_classes": 3}


def tiny_vit(seed: int = 0, **changes) -> VisionTransformer:
    """A ViT of about a thousand parameters in fp64, attention fused, weights large enough to curve the loss."""
    torch.manual_seed(seed)
    model = VisionTransformer(**{**SMALL, **changes}).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def images(count: int, side: int = 8, classes: int = 3, seed: int = 1, sizes: tuple[int, ...] = ()) -> list:
    """``count`` random images in fp64 with labels, in batches of ``sizes``, by default one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, side, side, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (count,), generator=generator)
    return list(zip(x.split(sizes or (count,)), y.split(sizes or (count,)), strict=True))


def timm_model(name: str, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **kwargs).eval()
