"""Exporters: each builds a file, verifies it through a back-end of ``vtk.runtime``, and keeps it only if right."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ExportResult": "vtk_export.onnx",
        "GateRow": "vtk_export.verify",
        "OnnxConfig": "vtk_export.config",
        "export_onnx": "vtk_export.onnx",
        "temporary_onnx": "vtk_export.onnx",
    },
)
