"""Parses ``key=value`` arguments of the command line, such as ``--model-kwargs depth=4 embed_dim=96``."""

from collections.abc import Mapping, Sequence
from typing import Any

from vtk.card import OWN_ARGUMENTS
from vtk.errors import UsageError
from vtk.options.yaml_text import parse_yaml


def parse_model_kwargs(items: Sequence[str]) -> dict[str, Any]:
    """Return timm's arguments of a model, by `parse_pairs`."""
    return parse_pairs("--model-kwargs", items, OWN_ARGUMENTS, "depth=4")


def parse_pairs(flag: str, items: Sequence[str], owned: Mapping[str, str], example: str) -> dict[str, Any]:
    """Return ``key=value`` items as a dict; values are numbers, booleans, null, lists or text.

    Args:
        flag: option, for messages.
        items: words of the command line.
        owned: keys with an option of their own → that option.
        example: for messages.

    Raises:
        UsageError: an item without ``=``, a repeated key, or a key with an option of its own.
    """
    result: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"`{flag}` {item!r}: write key=value, as in {example}")
        if key in owned:
            raise UsageError(f"`{flag}` {key}: this is set by {owned[key]}")
        if key in result:
            raise UsageError(f"`{flag}` {key}: given twice")
        result[key] = _number(parse_yaml(text, f"`{flag}` {item[:80]!r}", "has a value that cannot be read"))
    return result


def _number(value: Any) -> Any:
    """Return a value with texts such as 1e-6, which YAML does not parse, as numbers."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if isinstance(value, str) and value[:1] in "+-.0123456789":
        try:
            return float(value)
        except ValueError:
            return value
    return value
