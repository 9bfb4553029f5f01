"""The linter of ONNX files for TensorRT's parser and fused kernels."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "lint": "vtk_export.lint.linter",
        "load": "vtk_export.lint.linter",
    },
)
