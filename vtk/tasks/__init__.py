"""`vtk.packs` under its name of version 0.1; importing it warns. It goes with version 1."""

from typing import TYPE_CHECKING

from vtk._moved import alias

if TYPE_CHECKING:
    from vtk.packs.base_files import store_base as store_base
    from vtk.packs.cards import read_card as read_card
    from vtk.packs.load import Task as Task
    from vtk.packs.load import load_checkpoint as load_checkpoint
    from vtk.packs.load import load_task as load_task
    from vtk.packs.merge import merge_task as merge_task
    from vtk.packs.pack import save_task as save_task

alias(__name__)
