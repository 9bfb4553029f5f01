"""Many tasks on one device: one base, the tasks' own weights, mixed batches."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Memory": "vtk.serving.memory",
        "TaskBank": "vtk.serving.bank",
        "TaskInfo": "vtk.serving.memory",
        "TaskMemory": "vtk.serving.memory",
        "launches": "vtk.serving.counting",
    },
)
