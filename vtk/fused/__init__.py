"""A trained model in, an inference model out: folded, merged, and on CUDA replayed as one graph."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Fp8ViT": "vtk.fused.fp8",
        "FusedViT": "vtk.fused.model",
        "GraphCache": "vtk.fused.graphs",
        "ModelGraph": "vtk.fused.model_graph",
        "count_launches": "vtk.fused.counting",
        "fuse": "vtk.fused.build",
        "launches": "vtk.fused.counting",
        "separate_qkv": "vtk.fused.separate",
        "to_fp8": "vtk.fused.fp8",
    },
)
