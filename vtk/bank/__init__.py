"""Many tasks on one device: one base, the tasks' own weights, mixed batches."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Memory": "vtk.bank.memory_report",
        "TaskBank": "vtk.bank.bank",
        "TaskInfo": "vtk.bank.memory_report",
        "TaskMemory": "vtk.bank.memory_report",
        "check_architecture": "vtk.bank.architectures",
        "launches": "vtk.bank.kernel_count",
    },
)
