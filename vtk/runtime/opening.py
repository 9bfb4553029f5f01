"""A source opened, and what the user should know of it said."""

from pathlib import Path
from typing import Any

from vtk import console
from vtk.runtime.source import Source, open_source


def open_and_tell(source: str | Path | Source, *, many: bool = False, **opening: Any) -> Source:
    """Open a source and print its notes; see `open_source` for the arguments and for what it raises.

    Args:
        source: what to open; one that is open already is returned as it is.
        many: it may be a file of many tasks.
        opening: how to open it.
    """
    if isinstance(source, Source):
        return source
    found = open_source(source, many=many, **opening)
    for note in found.notes:
        console.say(note)
    return found
