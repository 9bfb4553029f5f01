"""The training engine: the loop, its optimizers, number formats, processes and callbacks."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "fit": "vtk.training.engine.fitting",
    },
)
