"""Load tests of a live inference server that speaks the KServe v2 protocol (Triton and others)."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ServerConfig": "vtk.profiling.server.config",
        "ServerLevel": "vtk.profiling.server.result",
        "ServerResult": "vtk.profiling.server.result",
        "profile_server": "vtk.profiling.server.drive",
    },
)
