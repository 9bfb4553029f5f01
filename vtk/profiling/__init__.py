"""Latency per batch size and back-end; every output is compared before its latency is shown."""

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
