"""Latency per batch size and per back-end, each number printed only after the outputs were compared."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BackendResult": "vtk.profiling.cells",
        "Cell": "vtk.profiling.cells",
        "ProfileConfig": "vtk.profiling.config",
        "ProfileResult": "vtk.profiling.result",
        "percentile": "vtk.profiling.stats",
    },
)
