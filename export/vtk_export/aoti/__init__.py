"""AOTInductor export: a compiled ``.pt2``, its loaders and its gate."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AotiConfig": "vtk_export.aoti.config",
        "AotiResult": "vtk_export.aoti.export",
        "export_aoti": "vtk_export.aoti.export",
        "temporary_aoti": "vtk_export.aoti.export",
    },
)
