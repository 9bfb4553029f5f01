"""Training of attention with frozen norms and FFNs, which keeps less for the backward pass.

`apply_memory_mode` changes how the blocks of a timm Vision Transformer run while they train. Per token and block, in
units of C bf16 elements, the modes keep of a plain block, whose hidden layer is ρ C wide: ``plain`` 6 + ρ, ``act8``
6 + ρ/2, ``recompute`` 6, ``minimal`` 3; full fine-tuning keeps 8 + 2ρ. Of a block with SwiGLU: 6 + 3ρ, 6 + 1.06ρ, 6 and
3; full fine-tuning 8 + 4ρ (see `vtk.training.frozen_ffn.formula`).
"""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "MemoryPlan": "vtk.training.frozen_ffn.blocks",
        "apply_memory_mode": "vtk.training.frozen_ffn.blocks",
        "obstacles": "vtk.training.frozen_ffn.blocks",
        "remove_memory_mode": "vtk.training.frozen_ffn.blocks",
    },
)
