"""A live inference server that speaks KServe's v2 protocol (Triton and others), driven and measured from outside."""

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
