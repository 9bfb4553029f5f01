"""A small ViT that experiments have in common, so that a run of one is a run of the others.

Depth 4, 64 wide and 40 epochs on 1,000 images end well after the loss has fallen, so that accuracies of two seeds
differ by about a point, where a deeper model that is still on its plateau differs by ten. Average pooling is part of
that: with a class token some seeds start to learn several epochs later than others, and end 4 points apart.
"""

from typing import Any

_POOLED = ("class_token=False", "global_pool='avg'")
CLASS_TOKEN_VIT: dict[str, Any] = {
    "model": "vit_tiny_patch16_224", "img_size": 32, "batch_size": 32, "crop_scale": (0.8, 1.0), "weight_decay": 0.3,
    "model_kwargs": ("patch_size=8", "embed_dim=64", "depth=4", "num_heads=2"),
}  # fmt: skip
VIT: dict[str, Any] = {**CLASS_TOKEN_VIT, "model_kwargs": (*CLASS_TOKEN_VIT["model_kwargs"], *_POOLED)}
"""16 patches in 4×4 positions."""
FINE_VIT: dict[str, Any] = {**VIT, "model_kwargs": ("patch_size=4", *VIT["model_kwargs"][1:])}
"""8×8 positions, as in Park and Kim (2022) on images of 32 px: for kernels of attention and for frequencies."""
TRAIN: dict[str, Any] = {"epochs": 40, "lr": 1e-3}
FINE_TRAIN: dict[str, Any] = {"epochs": 20, "lr": 1e-3}
PHOTOGRAPHS: dict[str, Any] = {"epochs": 20, "lr": 1e-3}
"""Longer training of 1,000 photographs makes the held-out loss rise."""
