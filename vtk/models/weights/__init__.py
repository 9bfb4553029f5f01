"""Pretrained weights: reading, renaming and downloading them."""
