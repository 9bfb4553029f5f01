"""Models that are measured and checked: built by timm on the device, with random weights that hide nothing."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock
from torch import nn

TINY = {"embed_dim": 64, "num_heads": 2, "num_classes": 10}
"""Takes the place of a model's sizes in a smoke test."""


@dataclass(frozen=True)
class Model:
    """How to build a model.

    Attributes:
        timm: name.
        kwargs: of timm's factory.
        change: made afterwards, in place.
        px: height and width of the images it is measured on.
    """

    timm: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], object] | None = None
    px: int = 224

    def build(self, px: int | None = None, *, device: torch.device, smoke: bool = False, seed: int = 0) -> nn.Module:
        """Return the model in fp32 and eval mode with `randomise`d weights; tiny in a smoke test."""
        kwargs = {**self.kwargs, "img_size": px or self.px, **({**TINY, "img_size": 32, "depth": 2} if smoke else {})}
        torch.manual_seed(seed)
        with torch.device(device):
            model = timm.create_model(self.timm, **kwargs)
        if self.change is not None:
            self.change(model)
        return randomise(model.to(device).eval().requires_grad_(False))

    def smaller(self, **kwargs: Any) -> "Model":
        """Return this model with other arguments."""
        return replace(self, kwargs={**self.kwargs, **kwargs})


END_TO_END = {
    "S18x2": Model("vit_small_patch16_18x2_224"),
    "S36x1": Model("vit_small_patch16_36x1_224"),
    "B/16": Model("vit_base_patch16_224"),
    "B18x2": Model("vit_base_patch16_18x2_224"),
    "S/16": Model("vit_small_patch16_224"),
    "B36x1": Model("vit_base_patch16_224", {"depth": 36, "init_values": 1e-5}),
    "DINOv3 S/16": Model("vit_small_patch16_dinov3", {"num_classes": 1000}, px=256),
    "DINOv3 B/16": Model("vit_base_patch16_dinov3", {"num_classes": 1000}, px=256),
    "EVA-02 B/14": Model("eva02_base_patch14_224", {"num_classes": 1000}),
}
"""Touvron et al. 2022, Table 4, its sequential twins (timm has no base model of 36 blocks by name), and backbones of
later years: with rotary embedding, the last also with SwiGLU and norms inside its FFN."""

SUBJECTS = (*((name, model.px) for name, model in END_TO_END.items()), ("B/16", 384))
"""Models and sizes that are measured."""


def _context_broadcast(model: nn.Module, **kwargs: Any) -> None:
    from vtk.models.transforms.context_layers import add_context_broadcast

    add_context_broadcast(model, **kwargs)


def _small(change: Callable[[nn.Module], object] | None = None, **kwargs: Any) -> Model:
    return Model("vit_small_patch16_224", {"depth": 4, **kwargs}, change)


CHECKED = {
    **{name: END_TO_END[name] for name in ("S18x2", "S36x1", "B/16")},
    "B18x2 of 6": Model("vit_base_patch16_18x2_224", {"depth": 6}),
    "3 branches": _small(block_fn=functools.partial(ParallelThingsBlock, num_parallel=3), init_values=1e-4),
    "parallel scaling": _small(block_fn=ParallelScalingBlock),
    "LayerScale": _small(init_values=1e-4),
    "qk norm": _small(qk_norm=True),
    "registers": _small(reg_tokens=4),
    "average pooling": _small(global_pool="avg", class_token=False),
    "map pooling": _small(global_pool="map"),
    "no qkv bias": _small(qkv_bias=False),
    "CB": _small(_context_broadcast),
    "CB_S": _small(functools.partial(_context_broadcast, scale=True)),
    "CB in parallel blocks": Model("vit_small_patch16_18x2_224", {"depth": 3}, _context_broadcast),
    "DINOv3": Model("vit_small_patch16_dinov3", {"num_classes": 1000, "depth": 4}),
    "EVA-02": Model("eva02_small_patch14_224", {"num_classes": 1000, "depth": 4}),
    "RoPE per head": Model("vit_small_patch16_rope_mixed_224", {"depth": 4}),
    "qk norm and RoPE": Model("vit_small_patch16_dinov3", {"num_classes": 1000, "depth": 4, "qk_norm": True}),
    "positions in the scores": Model("beit_base_patch16_224", {"depth": 4}),
}
"""Every block kind that is fused, full depth where that is what is measured later."""


def randomise(model: nn.Module) -> nn.Module:
    """Replace neutral values: with γ = 1, β = 0, bias = 0 and LayerScale = 1e-5 a wrong fold changes nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("gamma"):
                parameter.copy_(0.3 + 0.1 * noise)
            elif name.rpartition(".")[0].rpartition(".")[2].find("norm") >= 0 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.1 * noise)
    return model
