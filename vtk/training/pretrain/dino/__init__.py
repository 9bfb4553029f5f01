"""DINO (Caron et al. 2021): self-distillation without labels, from a moving average of the model itself."""
