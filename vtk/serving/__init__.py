"""The name of `vtk.bank` in version 0.1, which files of that version import; it warns, and goes with version 1."""

import warnings

import vtk.bank
from vtk._lazy import attach

warnings.warn("vtk.serving is now vtk.bank; import that", FutureWarning, stacklevel=2)

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(vtk.bank.__all__, "vtk.bank"))
