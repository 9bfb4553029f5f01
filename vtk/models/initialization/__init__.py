"""Initial weights of this project's layers: a table by kind of layer, and the draws from it."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "TABLE": "vtk.models.initialization.table",
        "initial_weights": "vtk.models.initialization.draw",
        "reset": "vtk.models.initialization.draw",
        "reset_tensor": "vtk.models.initialization.draw",
        "scheme": "vtk.models.initialization.draw",
    },
)
