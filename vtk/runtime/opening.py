"""A source opened, and what the user should know of it said."""

from typing import TYPE_CHECKING, Unpack

from vtk import console
from vtk.runtime.source import Opening, Source, open_source

if TYPE_CHECKING:
    from vtk.runtime.source import Openable


def open_and_tell(source: "Openable", *, many: bool = False, **opening: Unpack[Opening]) -> Source:
    """Open a source and print its notes; see `open_source` for the arguments and for what it raises.

    Args:
        source: what to open; one that is open already is returned as it is.
        many: it may be a file of many tasks.
        opening: how to open it.
    """
    found = open_source(source, many=many, **opening)
    for note in () if found is source else found.notes:
        console.say(note)
    return found
