"""Names of a package that are imported on first use, so that ``import vtk`` and ``vtk --help`` stay free of torch."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(package: str, where: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package.

    Args:
        package: ``__name__`` of the package.
        where: public name to the module that defines it.
    """

    def getattr_(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(where[name]), name)
        except ModuleNotFoundError as error:
            from vtk.packages import explain

            raise explain(error) or error from error
        setattr(sys.modules[package], name, value)
        return value

    return getattr_, lambda: sorted(where), sorted(where)
