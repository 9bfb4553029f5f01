"""Converts a sequential Vision Transformer to parallel blocks, and measures the drift."""
