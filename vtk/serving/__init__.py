"""`vtk.bank` under its name of version 0.1; importing it warns. It goes with version 1."""

from typing import TYPE_CHECKING

from vtk._moved import alias

if TYPE_CHECKING:
    from vtk.bank.bank import TaskBank as TaskBank
    from vtk.bank.kernel_count import launches as launches
    from vtk.bank.memory_report import Memory as Memory
    from vtk.bank.memory_report import TaskInfo as TaskInfo
    from vtk.bank.memory_report import TaskMemory as TaskMemory

alias(__name__)
