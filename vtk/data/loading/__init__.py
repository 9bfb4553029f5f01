"""Batches of transformed images: transforms, samplers and the loader."""
