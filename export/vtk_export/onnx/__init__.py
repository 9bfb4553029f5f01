"""ONNX export of one model."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ExportResult": "vtk_export.onnx.export",
        "export_onnx": "vtk_export.onnx.export",
        "temporary_onnx": "vtk_export.onnx.export",
    },
)
