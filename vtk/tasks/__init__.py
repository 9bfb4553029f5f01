"""The name of `vtk.packs` in version 0.1, which files of that version import; it warns, and goes with version 1."""

import warnings

import vtk.packs
from vtk._lazy import attach

warnings.warn("vtk.tasks is now vtk.packs; import that", FutureWarning, stacklevel=2)

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(vtk.packs.__all__, "vtk.packs"))
