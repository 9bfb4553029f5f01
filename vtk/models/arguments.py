"""Parses ``key=value`` arguments of the command line, such as ``--model-kwargs depth=4 embed_dim=96``."""

from collections.abc import Mapping, Sequence
from typing import Any

from vtk.card import OWN_ARGUMENTS
from vtk.errors import UsageError
from vtk.options.yaml_text import parse_yaml


def parse_model_kwargs(items: Sequence[str]) -> dict[str, Any]:
    """Return timm's arguments of a model, by `parse_pairs`.

    Raises:
        UsageError: see `parse_pairs`, or a value of None.
    """
    found = parse_pairs("--model-kwargs", items, OWN_ARGUMENTS, "depth=4")
    # YAML's word is null; None is a text there
    refuse_none("--model-kwargs", {k: None if v == "None" else v for k, v in found.items()})
    return found


def refuse_none(flag: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that are None: timm leaves them out, and a model keeps its own value.

    Raises:
        UsageError: names the argument.
    """
    name = next((name for name, value in kwargs.items() if value is None), None)
    if name is not None:
        how = "give init_values=0 for no LayerScale" if name == "init_values" else "give a value, or leave it out"
        raise UsageError(f"`{flag}` {name}=None: timm ignores None, so the model would keep its own {name}; {how}")


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
