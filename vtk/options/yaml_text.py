"""Reads untrusted YAML within limits: no alias bombs, no deep nesting."""

from typing import Any

import yaml

from vtk.errors import UsageError
from vtk.readers import reading

_DEEPEST, _MOST = 64, 100_000
"""Most levels, and most values with all aliases expanded; option files have three levels and a few hundred values."""


def parse_yaml(text: str, where: str, fault: str = "is not valid YAML") -> Any:
    """Return the value of a YAML text.

    Args:
        text: one document, or none.
        where: its name in messages.
        fault: message for invalid YAML.

    Raises:
        UsageError: it is not YAML, contains itself, or exceeds the limits.
    """
    with reading(where, fault, "write `key: value` lines", UsageError):
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):  # iterative: depth needs no stack
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"it has more than {_DEEPEST} levels")
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _count(node, {}, 0) > _MOST:
                raise UsageError(f"{where} expands to more than {_MOST:,} values through aliases; write the values out")
            return loader.construct_document(node)
        finally:
            loader.dispose()  # type: ignore[no-untyped-call]


def _count(node: Any, known: dict[int, int], depth: int) -> int:
    """Return the number of values of a node, with aliases expanded; each node is counted once."""
    if depth > _DEEPEST:
        raise ValueError(f"it has more than {_DEEPEST} levels, or contains itself")
    if id(node) not in known:
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        flat = [each for child in children for each in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_count(each, known, depth + 1) for each in flat)
    return known[id(node)]
