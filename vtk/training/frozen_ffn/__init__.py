"""Training of attention with frozen norms and FFNs, which keeps less for the backward pass.

`apply_memory_mode` changes how the blocks of a timm Vision Transformer run while they train. Per token and block, in
units of C elements, the modes keep: ``plain`` 10, ``gelu8`` 8, ``recompute`` 6, ``minimal`` 3; full fine-tuning keeps
16.
"""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "MemoryPlan": "vtk.training.frozen_ffn.blocks",
        "apply_memory_mode": "vtk.training.frozen_ffn.blocks",
        "remove_memory_mode": "vtk.training.frozen_ffn.blocks",
    },
)
