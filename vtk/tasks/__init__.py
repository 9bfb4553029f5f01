"""Task packs: what differs from the base, saved, loaded, compared and merged."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Task": "vtk.tasks.load",
        "load_checkpoint": "vtk.tasks.load",
        "load_task": "vtk.tasks.load",
        "merge_task": "vtk.tasks.merge",
        "read_card": "vtk.tasks.cards",
        "save_task": "vtk.tasks.pack",
        "store_base": "vtk.tasks.base",
    },
)
