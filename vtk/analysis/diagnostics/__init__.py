"""Diagnostics of ``vtk analyze --what``, one module each, loaded by name."""

import importlib
from typing import TYPE_CHECKING

from vtk.analysis.diagnostic_names import GROUPS, NAMES

if TYPE_CHECKING:
    from vtk.analysis.diagnostics.base import Diagnostic

__all__ = ["GROUPS", "NAMES", "diagnostic"]


def diagnostic(name: str) -> "Diagnostic":
    """Return the diagnostic of that name, one of ``NAMES``; its module holds it as ``DIAGNOSTIC``."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    found: Diagnostic = module.DIAGNOSTIC
    return found
