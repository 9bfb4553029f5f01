"""Readers of timm's families of Vision Transformers: each says what its model's tokens, blocks and logits are made of.

`reader_of` returns the reader of a model. A reader gives, from the model: the `Embedding` (stem, prefix tokens and
positions), the stages of each block, the `Rotary` tables where it has some, and the `Head`. A new family is one module
here with a subclass of `Reader`, and a line in `registry.READERS`.
"""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {"Reader": "vtk.fused.families.reader", "reader_of": "vtk.fused.families.registry"},
)
