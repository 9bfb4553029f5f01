"""YAML that others wrote as values of a config dataclass's fields."""

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from vtk.errors import UsageError


def read_values(path: Path, kind: type, flag: str) -> dict[str, Any]:
    """Read a file of ``key: value`` lines.

    Args:
        path: the file.
        kind: dataclass whose fields the keys are, with ``-`` or ``_``.
        flag: that gave the file, for messages.

    Returns:
        The values, each of its field's type.

    Raises:
        UsageError: the file cannot be read, or a key or a value does not fit.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"`{flag}` {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"`{flag}` {path} is not valid YAML: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"`{flag}` {path} must hold `key: value` lines, found {type(value).__name__}")
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if not _of_class(hint)}
    result = {}
    for key, item in value.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            raise UsageError(f"`{flag}` {path}: unknown key `{key}`; known: {', '.join(hints)}")
        try:
            result[name] = from_yaml(hints[name], item)
        except (TypeError, ValueError) as error:
            raise UsageError(f"`{flag}` {path}: `{key}`: {error}") from error
    return result


def _of_class(hint: Any) -> bool:
    """Whether a hint is of a class variable, which is no field."""
    return hint is typing.ClassVar or typing.get_origin(hint) is typing.ClassVar


def from_yaml(hint: Any, value: Any) -> Any:
    """Convert a YAML value to a field's type; PyYAML reads ``1e-3`` as text, so numbers may be text.

    Raises:
        ValueError: the value does not fit.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in (a for a in args if a is not type(None)):
            try:
                return from_yaml(option, value)
            except (TypeError, ValueError) as error:
                errors.append(str(error))
        raise ValueError("; ".join(errors))
    if origin is Literal:
        if value in args:
            return value
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, args))}")
    if origin is tuple:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(items):
            raise ValueError(f"expected {len(kinds)} values, found {len(items)}")
        return tuple(from_yaml(k, v) for k, v in zip(kinds, items, strict=True))
    if hint is bool or isinstance(value, bool):
        if hint is bool and isinstance(value, bool):
            return value
        raise ValueError(f"expected {hint.__name__}, found {value!r}")
    if hint is int and isinstance(value, int):  # as a float a large one would change
        return value
    if hint in (int, float) and isinstance(value, (int, float, str)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise ValueError(f"expected a number, found {value!r}") from None
        if hint is int and not number.is_integer():  # nor is infinity
            raise ValueError(f"expected a whole number, found {value!r}")
        return hint(number)
    if hint in (str, Path) and isinstance(value, (str, int, float)):
        return hint(str(value))
    raise ValueError(f"expected {getattr(hint, '__name__', hint)}, found {value!r}")
