"""A training step of fixed shapes that never waits for its device, and runs as one CUDA graph there.

`reason_against` says which runs have no such step; `StaticStep` is it. On a GPU every other run takes it, captured or
not, so that ``--cuda-graph on`` and ``off`` give the same bits.
"""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "StaticStep": "vtk.training.engine.static_step.step",
        "make_static_step": "vtk.training.engine.static_step.make",
        "reason_against": "vtk.training.engine.static_step.rules",
    },
)
