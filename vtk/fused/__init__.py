"""Converts a trained Vision Transformer into an inference model: folded, merged, replayed as one CUDA graph."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Fp8ViT": "vtk.fused.fp8",
        "FusedViT": "vtk.fused.model",
        "GraphCache": "vtk.fused.graph_cache",
        "ModelGraph": "vtk.fused.captured_batch",
        "count_launches": "vtk.fused.kernel_count",
        "fuse": "vtk.fused.build",
        "launches": "vtk.fused.kernel_count",
        "separate_qkv": "vtk.fused.attention_stage",
        "to_fp8": "vtk.fused.fp8",
    },
)
