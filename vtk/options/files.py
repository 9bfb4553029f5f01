"""Options from a YAML file: checked one by one against a config, before it is made."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vtk.errors import UsageError
from vtk.options.config import Config, set_value


def read_values(path: Path, kind: type[Config], flag: str) -> dict[str, Any]:
    """Read the values that a YAML file gives for a config's options.

    Args:
        path: of a file with ``option: value`` lines; names may have ``-`` or ``_``.
        kind: the config.
        flag: that named the file, for messages.

    Raises:
        UsageError: no such file, not YAML, an unknown key, or a value that does not fit.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"`{flag}` {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"`{flag}` {path} is not valid YAML: {error}") from error
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
            result[key] = set_value(kind, key, item, text=True)
        except UsageError as error:
            raise UsageError(f"`{flag}` {path}: {error}") from error
    return result
