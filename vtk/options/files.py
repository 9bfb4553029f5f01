"""Reads options from a YAML file and checks each against a config."""

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
"""Pipes of a shell's process substitution, which have a writer; another pipe may have none and block forever."""


def read_values(path: Path, kind: type[Config], flag: str) -> dict[str, Any]:
    """Read the values that a YAML file gives for a config's options.

    Args:
        path: of a file with ``option: value`` lines; names may have ``-`` or ``_``.
        kind: the config.
        flag: option that names the file, for messages.

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
            hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(names)}"
            raise UsageError(f"`{flag}` {path}: unknown key `{key}`; {hint}")
        try:
            with reading(f"the value of `{key}`", "cannot be used", "give another", UsageError):
                result[key] = set_value(kind, key, item, text=True)
        except UsageError as error:
            raise UsageError(f"`{flag}` {path}: {error}") from error
    return result


def _read(path: Path, flag: str) -> str:
    """Return the text of a file of options."""
    with reading(f"`{flag}` {path}", "is not UTF-8 text", "write `key: value` lines", UsageError):
        if not path.is_file() and path.exists() and not str(path).startswith(_STREAMS):
            raise UsageError(f"`{flag}` {path} is not a regular file; give a file of `key: value` lines")
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
        if len(data) > _LONGEST:
            raise UsageError(f"`{flag}` {path} has more than {_LONGEST:,} bytes; give a file of `key: value` lines")
        return data.decode("utf-8")
