"""Converts values from Python, YAML or a command line to the types of options."""

import numbers
import os
import re
import types
import typing
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
}
_SWITCH = {"yes": True, "no": False}


def is_union(hint: Any) -> bool:
    """Return whether a type has alternatives."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type without None; of a type without any, the type itself."""
    return tuple(a for a in typing.get_args(hint) if a is not type(None)) if is_union(hint) else (hint,)


def is_list(hint: Any) -> bool:
    """Return whether a type is ``tuple[X, ...]``."""
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[1:] == (Ellipsis,)


def is_size(hint: Any) -> bool:
    """Return whether a type is one number or a pair of them, as image sizes are."""
    return {int, tuple[int, int]} <= set(alternatives(hint))


def describe(hint: Any) -> str:
    """Return in words what a type allows, for messages."""
    if is_size(hint):
        return "one side in pixels, or height and width"
    found = alternatives(hint)
    if len(found) > 1:
        return " or ".join(describe(one) for one in found)
    (hint,) = found
    if typing.get_origin(hint) is Literal:
        *first, last = map(str, typing.get_args(hint))
        return f"{', '.join(first)} or {last}" if first else last
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        of = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}.get(args[0], describe(args[0]))
        return f"a list of {of}" if args[-1] is Ellipsis else f"{len(args)} {of}"
    return _WORDS.get(hint, str(hint))


def coerce(hint: Any, value: Any, *, text: bool = False) -> Any:
    """Convert a value to a field's type.

    Text is accepted as a path, a whole number as a float, and a list as a tuple; NumPy's numbers count as Python's.
    Nothing is rounded, and booleans are not numbers.

    Args:
        hint: ``int``, ``float``, ``str``, ``bool``, ``Path``, a ``Literal``, tuples of these, or alternatives.
        value: to convert.
        text: the value is from a file, where numbers may be text (PyYAML reads ``1e-3`` as text) and the reverse.

    Raises:
        ValueError: the value does not fit; the message says what is allowed.
    """
    if isinstance(value, (str, os.PathLike)) and not _is_writable(str(value)):
        raise ValueError(f"{describe(hint)} without characters that no file name can have")
    if isinstance(value, str):  # also NumPy strings and string enums
        value = str.__str__(value)
    if is_union(hint):
        if value is None and type(None) in typing.get_args(hint):
            return None
        for option in _by_preference(hint, value):
            try:
                return coerce(option, value, text=text)
            except ValueError:
                continue
        raise ValueError(describe(hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if any(type(value) is type(one) and value == one for one in args):
            return value
    elif origin is tuple:
        return _tuple(hint, value, text)
    elif hint is bool:
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # also NumPy booleans
            return bool(value)
    elif hint in (int, float) and not isinstance(value, bool):
        return _number(hint, value, text)
    elif hint is Path:
        if isinstance(value, (str, os.PathLike)) and str(value).strip():
            return Path(value)
        if text and isinstance(value, (int, float)) and not isinstance(value, bool):
            return Path(str(value))
    elif hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, os.PathLike):  # the path of a file or model
            return os.fspath(value)
        if text and isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
    raise ValueError(describe(hint))


def _is_writable(text: str) -> bool:
    """Return whether the system accepts a text as a path: no NUL, no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _by_preference(hint: Any, value: Any) -> list[Any]:
    """Return a type's alternatives, first those that the value is an instance of: a path stays a path."""
    return sorted(alternatives(hint), key=lambda one: not (isinstance(one, type) and isinstance(value, one)))


def _number(hint: Any, value: Any, text: bool) -> int | float:
    if isinstance(value, numbers.Integral):
        try:
            return hint(int(value))
        except OverflowError:  # no float holds it
            raise ValueError(describe(hint)) from None
    if isinstance(value, (numbers.Real, *((str,) if text else ()))):
        try:
            if hint is int and isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
                return int(value)
            number = float(value)  # type: ignore[arg-type]  # numbers.Real has it
        except (ValueError, OverflowError):
            raise ValueError(describe(hint)) from None
        if hint is float or number.is_integer():  # infinity is no whole number
            return hint(number)
    raise ValueError(describe(hint))


def _tuple(hint: Any, value: Any, text: bool) -> tuple[Any, ...]:
    args = typing.get_args(hint)
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Sequence):
        # a single value for a list of one
        items = [value] if args[-1] is Ellipsis and isinstance(value, (str, os.PathLike, numbers.Real)) else None
    else:
        items = list(value)
    if items is None:
        raise ValueError(describe(hint))
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(items):
        raise ValueError(describe(hint))
    try:
        return tuple(coerce(kind, item, text=text) for kind, item in zip(kinds, items, strict=True))
    except ValueError:
        raise ValueError(describe(hint)) from None


def from_words(hint: Any, words: Sequence[str]) -> Any:
    """Convert the words after a flag on a command line: ``1,2 4`` for a list, ``48x64`` for a size.

    Raises:
        ValueError: it does not fit; the message says what is allowed.
    """
    optional = is_union(hint) and type(None) in typing.get_args(hint)
    if optional and list(words) == ["None"]:
        return None
    if is_size(hint):
        parts = [part for word in words for part in re.split("[,x×]", word.strip())]
        if not 1 <= len(parts) <= 2 or not all(re.fullmatch(r"[+-]?\d{1,9}", part) for part in parts):
            raise ValueError(describe(hint))
        return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    for option in alternatives(hint):
        if typing.get_origin(option) is tuple:
            # commas within brackets do not separate
            parts = [part.strip() for word in words for part in re.split(r",(?![^\[\]]*\])", word)]
            return coerce(option, [part for part in parts if part], text=True)
    if len(words) != 1:
        raise ValueError(describe(hint))
    if bool in alternatives(hint):
        if words[0] not in _SWITCH:
            raise ValueError("yes or no")
        return _SWITCH[words[0]]
    return coerce(hint, words[0], text=True)


@cache
def placeholder(hint: Any) -> str:
    """Return the placeholder of a value in help: ``FLOAT``, ``{a,b}``, ``INT,…``."""
    if is_size(hint):
        return "PIXELS"
    names = []
    for one in alternatives(hint):
        if typing.get_origin(one) is Literal:
            words = ",".join(map(str, typing.get_args(one)))
            names.append(f"{{{words}}}" if "," in words else words)
        elif typing.get_origin(one) is tuple:
            args = typing.get_args(one)
            inner = placeholder(args[0])
            names.append(f"{inner},…" if args[-1] is Ellipsis else " ".join(map(placeholder, args)))
        else:
            names.append({str: "TEXT", bool: "yes|no"}.get(one, getattr(one, "__name__", "VALUE").upper()))
    return "|".join(names)
