"""``--model-kwargs depth=4 embed_dim=96``: arguments for timm from the command line."""

from collections.abc import Sequence
from typing import Any

import yaml

from vtk.card import OWN_ARGUMENTS
from vtk.errors import UsageError


def parse_model_kwargs(items: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` items; values are numbers, booleans, null, lists or text.

    Raises:
        UsageError: an item has no ``=``, is given twice, or has a flag of its own.
    """
    result: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"`--model-kwargs` {item!r}: write key=value, as in depth=4")
        if key in OWN_ARGUMENTS:
            raise UsageError(f"`--model-kwargs` {key}: this is set by {OWN_ARGUMENTS[key]}")
        if key in result:
            raise UsageError(f"`--model-kwargs` {key}: given twice")
        try:
            result[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"`--model-kwargs` {item!r}: the value cannot be read") from error
    return result
