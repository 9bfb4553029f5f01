"""Options from a YAML file: checked one by one against a config, before it is made."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtk.errors import UsageError
from vtk.options.config import Config, set_value
from vtk.options.yaml_text import parse_yaml
from vtk.readers import reading

_LONGEST = 4 << 20
_STREAMS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Where a shell puts what a command writes: such a pipe has a writer. Any other may have none, and never end."""


def read_values(path: Path, kind: type[Config], flag: str) -> dict[str, Any]:
    """Read the values that a YAML file gives for a config's options.

    Args:
        path: of a file with ``option: value`` lines; names may have ``-`` or ``_``.
        kind: the config.
        flag: that named the file, for messages.

    Raises:
        UsageError: no such file, not YAML, an unknown key, or a value that does not fit.
    """
    value = parse_yaml(_read(path, flag), f"`{flag}` {path}") or {}
    if not isinstance(value, Mapping):
        raise UsageError(f"`{flag}` {path} must hold `key: value` lines, found {type(value).__name__}")
    names = [f.name for f in dataclasses.fields(kind)]
    result = {}
    for key, item in kind.upgrade({str(key).replace("-", "_"): item for key, item in value.items()}).items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            told = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(names)}"
            raise UsageError(f"`{flag}` {path}: unknown key `{key}`; {told}")
        try:
            with reading(f"the value of `{key}`", "cannot be taken", "give another", UsageError):
                result[key] = set_value(kind, key, item, text=True)
        except UsageError as error:
            raise UsageError(f"`{flag}` {path}: {error}") from error
    return result


def _read(path: Path, flag: str) -> str:
    """Return the text of a file of options."""
    with reading(f"`{flag}` {path}", "is no text in UTF-8", "write `key: value` lines", UsageError):
        if not path.is_file() and path.exists() and not str(path).startswith(_STREAMS):
            raise UsageError(f"`{flag}` {path} is not a regular file; give a file of `key: value` lines")
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
        if len(data) > _LONGEST:
            raise UsageError(f"`{flag}` {path} has more than {_LONGEST:,} bytes; give a file of `key: value` lines")
        return data.decode("utf-8")
