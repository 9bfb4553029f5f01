"""Decoding: from an image file to the 8-bit image that a model sees."""
