"""The source that a command's options name."""

from pathlib import Path
from typing import Protocol

from vtk import console
from vtk.runtime.source import Source, open_source


class SourceOptions(Protocol):
    """What the options of an exporter or of the profiler say about their source."""

    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def base(self) -> Path | None: ...  # noqa: D102
    @property
    def pretrained(self) -> bool: ...  # noqa: D102
    @property
    def num_classes(self) -> int | None: ...  # noqa: D102
    @property
    def img_size(self) -> int | tuple[int, int] | None: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


def open_asked(options: SourceOptions, *, many: bool = False) -> Source:
    """Open a source and say what the user should know of it; raises what `open_source` raises.

    Args:
        options: that name it.
        many: it may be a file of many tasks.
    """
    source = open_source(
        options.source,
        base=options.base,
        pretrained=options.pretrained,
        num_classes=options.num_classes,
        img_size=options.img_size,
        seed=options.seed,
        many=many,
    )
    for note in source.notes:
        console.say(note)
    return source
