"""Task packs: the tensors that differ from a base; saved, loaded, compared and merged."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Task": "vtk.packs.load",
        "load_checkpoint": "vtk.packs.load",
        "load_task": "vtk.packs.load",
        "merge_task": "vtk.packs.merge",
        "read_card": "vtk.packs.cards",
        "save_task": "vtk.packs.pack",
        "store_base": "vtk.packs.base_files",
    },
)
