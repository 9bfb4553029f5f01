"""Exporters: each builds a file, verifies it through a back-end of ``vtk.runtime``, and keeps it only if right."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AotiConfig": "vtk_export.aoti_config",
        "AotiResult": "vtk_export.aoti",
        "ExportResult": "vtk_export.onnx",
        "GateRow": "vtk_export.verify",
        "OnnxConfig": "vtk_export.config",
        "TasksConfig": "vtk_export.config",
        "TasksExportResult": "vtk_export.tasks",
        "TensorrtConfig": "vtk_export.tensorrt_config",
        "TensorrtResult": "vtk_export.tensorrt.export",
        "TritonConfig": "vtk_export.triton_config",
        "TritonExportResult": "vtk_export.triton.export",
        "export_aoti": "vtk_export.aoti",
        "export_onnx": "vtk_export.onnx",
        "export_tasks": "vtk_export.tasks",
        "export_tensorrt": "vtk_export.tensorrt.export",
        "export_triton": "vtk_export.triton.export",
        "temporary_aoti": "vtk_export.aoti",
        "temporary_onnx": "vtk_export.onnx",
    },
)
