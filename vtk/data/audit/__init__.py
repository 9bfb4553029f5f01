"""The audit of a set of images before training: classes, held-out part, duplicates, unusual images, and its page."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BadFile": "vtk.data.audit.result",
        "DataAudit": "vtk.data.audit.result",
        "Sample": "vtk.data.audit.result",
        "scan": "vtk.data.audit.folder_scan",
    },
)
