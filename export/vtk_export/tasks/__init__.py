"""ONNX export of several tasks of one base, as files that share weights or as one file for mixed batches."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "TasksExportResult": "vtk_export.tasks.export",
        "export_tasks": "vtk_export.tasks.export",
    },
)
