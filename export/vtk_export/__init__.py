"""Exporters: each writes files, verifies them through a back-end of ``vtk.runtime``, and keeps only verified ones."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AotiConfig": "vtk_export.aoti.config",
        "AotiResult": "vtk_export.aoti.export",
        "ExportResult": "vtk_export.onnx.export",
        "GateRow": "vtk_export.gate.verify",
        "OnnxConfig": "vtk_export.onnx.config",
        "OpenvinoConfig": "vtk_export.openvino.config",
        "OpenvinoResult": "vtk_export.openvino.export",
        "TasksConfig": "vtk_export.tasks.config",
        "TasksExportResult": "vtk_export.tasks.export",
        "TensorrtConfig": "vtk_export.tensorrt.config",
        "TensorrtResult": "vtk_export.tensorrt.export",
        "TritonConfig": "vtk_export.triton.config",
        "TritonExportResult": "vtk_export.triton.export",
        "export_aoti": "vtk_export.aoti.export",
        "export_onnx": "vtk_export.onnx.export",
        "export_openvino": "vtk_export.openvino.export",
        "export_tasks": "vtk_export.tasks.export",
        "export_tensorrt": "vtk_export.tensorrt.export",
        "export_triton": "vtk_export.triton.export",
        "temporary_aoti": "vtk_export.aoti.export",
        "temporary_onnx": "vtk_export.onnx.export",
    },
)
