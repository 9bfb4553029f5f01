"""A sequential Vision Transformer with its blocks side by side, and how far that is from the original."""
