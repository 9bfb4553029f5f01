"""Parses ``NAME=PACK`` and checks the names of tasks, which become parts of file names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vtk.errors import DataError, UsageError
from vtk.files import existing_dir

RESERVED = frozenset(
    {"tasks", "gathered", "factors", "shared", "con", "prn", "aux", "nul"}
    | {f"{d}{i}" for d in ("com", "lpt") for i in range(10)}
)
"""Names of the export's other files, and of devices of Windows."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", re.ASCII)
_RULE = "use up to 64 of A-Z a-z 0-9 . _ - with a letter or digit at both ends"


def named_packs(packs: Mapping[str, str | Path] | Sequence[str | Path]) -> dict[str, Path]:
    """Return packs by name, by default that of the run's folder.

    Args:
        packs: name to path; or ``PACK`` and ``NAME=PACK``, of which what is there as a path is a path, even with ``=``
            in its name.

    Returns:
        Name to path, in the order given.

    Raises:
        UsageError: a name that is no good as a file name, or two alike (capitals do not count: on some systems two such
            files would be one).
        DataError: a pattern that no path matched.
    """
    alone = isinstance(packs, (str, Path)) or not isinstance(packs, Iterable)
    for pack in [packs] if alone else packs.values() if isinstance(packs, Mapping) else packs:
        if alone or not isinstance(pack, (str, Path)):
            raise UsageError(f"packs are given as a list of paths, or a mapping of names to paths; found a "
                             f"{type(pack).__name__}")  # fmt: skip
    found: dict[str, Path] = {}
    seen: dict[str, str] = {}
    given = [(name, name, Path(path)) for name, path in packs.items()] if isinstance(packs, Mapping) else None
    for text, name, path in given or [(str(pack), *_split(str(pack))) for pack in packs]:
        if given is None and "*" in str(path) and not _is_there(path):  # a shell leaves what matches nothing as it is
            raise DataError(f"{text}: no such folder, and none that matches; give packs or run folders")
        _check(name, text)
        key = name.casefold()
        if key in seen:
            raise UsageError(
                f"{seen[key]!r} and {text!r} are both the task `{name}`; name them, such as {name}-1={path}"
            )
        seen[key] = text
        found[name] = path
    return found


def _split(text: str) -> tuple[str, Path]:
    path = Path(text).expanduser()
    name, equals, rest = text.partition("=")
    if equals and not _is_there(path):
        return name, Path(rest).expanduser()
    whole = path.absolute()
    return (whole.parent.name if whole.name == "task" else whole.name), path


def _is_there(path: Path) -> bool:
    try:
        return existing_dir(path).exists()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def _check(name: str, text: str) -> None:
    if not _NAME.fullmatch(name):
        given = "" if len(text) > 200 or name == text.partition("=")[0] else f" (of {text!r})"
        raise UsageError(f"{name!r}{given} is not a valid task name; {_RULE}: NAME=PACK")
    # Windows takes a device's name for the device whatever stands behind its first dot
    if name.casefold() in RESERVED or name.casefold().partition(".")[0] in RESERVED - {
        "tasks",
        "gathered",
        "factors",
        "shared",
    }:
        raise UsageError(f"`{name}` is not a valid task name: other files have it; give NAME=PACK")
