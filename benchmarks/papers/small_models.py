"""A small ViT that experiments have in common, so that a run of one is a run of the others.

Depth 4, 64 wide and 40 epochs on 1,000 images end well after the loss has fallen: the accuracies of two seeds differ by
about a point, where a deeper model that is still on its plateau differs by ten.
"""

from typing import Any

VIT: dict[str, Any] = {
    "model": "vit_tiny_patch16_224", "img_size": 32, "batch_size": 32, "crop_scale": (0.8, 1.0), "weight_decay": 0.3,
    "smoothing": 0.0, "model_kwargs": ("patch_size=8", "embed_dim=64", "depth=4", "num_heads=2"),
}  # fmt: skip
"""16 patches and a class token; cross-entropy without smoothing, whose curvature is that of the training loss."""
FINE_VIT: dict[str, Any] = {**VIT, "model_kwargs": ("patch_size=4", "embed_dim=64", "depth=4", "num_heads=2")}
"""8×8 positions, as in Park and Kim (2022) on images of 32 px: for kernels of attention and for frequencies."""
TRAIN: dict[str, Any] = {"epochs": 40, "lr": 1e-3}
FINE_TRAIN: dict[str, Any] = {"epochs": 20, "lr": 1e-3}
PHOTOGRAPHS: dict[str, Any] = {"epochs": 20, "lr": 1e-3}
"""Longer training of 1,000 photographs makes the held-out loss rise."""
