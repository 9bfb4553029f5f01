"""Connects to a server over HTTP or gRPC, and finds the model there."""

import urllib.parse

from vtk.errors import UnavailableError, UsageError
from vtk.profiling.server.client import Client, ModelInfo
from vtk.profiling.server.guard import GuardedClient
from vtk.readers import reading


def connect(url: str, protocol: str, timeout: float) -> Client:
    """Connect to a server and check that it answers.

    Raises:
        UsageError: ``url`` is not a valid address.
        UnavailableError: no server answers, it speaks another protocol, or the package for it is missing.
    """
    _check_url(url)
    with reading(f"the server at {url}", "does not answer as KServe's protocol has it", "is it such a server?",
                 UnavailableError):  # fmt: skip
        if protocol == "grpc":
            from vtk.profiling.server.grpc_client import GrpcClient

            return GuardedClient(GrpcClient(url, timeout), url)
        from vtk.profiling.server.http_client import HttpClient

        return GuardedClient(HttpClient(url, timeout), url)


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        right = bool(parts.hostname) and (parts.port is None or parts.port > 0) and url.isprintable()
    except ValueError:  # an open bracket, or a port that is none
        right = False
    if not right:
        raise UsageError(f"`--server` {url[:200]!r} is not a valid address; give HOST:PORT or http://HOST:PORT")


def choose_model(client: Client, wanted: str) -> ModelInfo:
    """Return the description of the requested model, or of the only one.

    Raises:
        UsageError: several, and none was named.
        UnavailableError: there is no such model.
    """
    if wanted:
        return client.info(wanted)
    names = client.models()
    if len(names) != 1:
        models = "has " + ", ".join(names) if names else "does not list its models"
        raise UsageError(f"the server {models}; give one as --model")
    return client.info(names[0])
