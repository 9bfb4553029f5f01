"""YAML that others wrote, read without its traps: aliases that repeat each other, and nesting beyond measure."""

from typing import Any

import yaml

from vtk.errors import UsageError
from vtk.readers import reading

_DEEPEST, _MOST = 64, 100_000
"""Levels, and values with every alias written out; files of options have three levels and some hundred values."""


def parse_yaml(text: str, where: str, fault: str = "is not valid YAML") -> Any:
    """Return the value of a YAML text.

    Args:
        text: one document, or none.
        where: names it in messages.
        fault: of what is no YAML, in the words of the option.

    Raises:
        UsageError: it is no YAML, holds itself, or is nested or repeated beyond measure.
    """
    with reading(where, fault, "write `key: value` lines", UsageError):
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):  # which takes no more of the stack for deeper ones
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"it has more than {_DEEPEST} levels")
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _count(node, {}, 0) > _MOST:
                raise UsageError(f"{where} is YAML of more than {_MOST:,} values, by aliases of aliases; write it out")
            return loader.construct_document(node)
        finally:
            loader.dispose()  # type: ignore[no-untyped-call]


def _count(node: Any, known: dict[int, int], depth: int) -> int:
    """Return how many values a node stands for; one that is met again is not counted anew."""
    if depth > _DEEPEST:
        raise ValueError(f"it has more than {_DEEPEST} levels, or holds itself")
    if id(node) not in known:
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        flat = [each for child in children for each in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_count(each, known, depth + 1) for each in flat)
    return known[id(node)]
