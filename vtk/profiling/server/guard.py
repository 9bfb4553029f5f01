"""Guards a client against malformed answers: whatever a parser raises becomes one of the errors of `Client`."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vtk.errors import UnavailableError, VtkError
from vtk.profiling.server.client import Client, Counters, ModelInfo, RequestFailed, TensorSpec
from vtk.profiling.server.pool import Pool
from vtk.readers import short

_LARGEST = 1 << 28
"""Numbers of one image: images of a server's own description are drawn here."""


class GuardedClient:
    """A client that raises and returns only what `Client` documents.

    Args:
        client: for the protocol.
        url: of the server, for messages.
    """

    def __init__(self, client: Client, url: str) -> None:
        self._client, self._url = client, url

    def models(self) -> list[str]:
        """Return the names of the models that are ready; none where the server's list cannot be read."""
        try:
            return [name for name in self._client.models() if isinstance(name, str)]
        except VtkError:
            raise
        except Exception:
            return []

    def info(self, model: str) -> ModelInfo:
        """Describe a model."""
        with self._readable(f"its description of `{model}`"):
            found = self._client.info(model)
            for spec in (*found.inputs, *found.outputs):
                _check(spec)
            if not isinstance(found.version, str) or not isinstance(found.platform, str):
                raise TypeError("version or platform is not a string")
            return found

    def counters(self, info: ModelInfo) -> Counters | None:
        """Return the server's statistics; None where they cannot be read."""
        try:
            return self._client.counters(info)
        except VtkError:
            raise
        except Exception:
            return None

    def request(self, info: ModelInfo, pool: Pool, number: int, batch: int, texts: Mapping[str, str]) -> Any:
        """Encode a request."""
        with self._readable(f"its description of `{info.name}`"):
            return self._client.request(info, pool, number, batch, texts)

    def infer(self, request: Any) -> Any:
        """Send a request and return the answer, undecoded."""
        try:
            return self._client.infer(request)
        except (RequestFailed, VtkError):
            raise
        except Exception as error:
            raise RequestFailed(f"the answer cannot be read ({short(error)})") from error

    def decode(self, answer: Any, output: str) -> "np.ndarray[Any, Any]":
        """Return one output of an answer, numbers with a row for each image."""
        try:
            found = self._client.decode(answer, output)
        except (RequestFailed, VtkError):
            raise
        except Exception as error:
            raise RequestFailed(f"the answer cannot be read ({short(error)})") from error
        if not isinstance(found, np.ndarray) or found.ndim < 1 or found.dtype.kind not in "fiub":
            raise RequestFailed(f"`{output}` of the answer is not a numeric array with one row per image")
        return found

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        try:
            yield
        except VtkError:
            raise
        except Exception as error:
            raise UnavailableError(
                f"the server at {self._url} cannot be used: {what} cannot be read ({short(error)}); does it speak "
                "the KServe protocol?"
            ) from error


def _check(spec: TensorSpec) -> None:
    if not isinstance(spec.name, str) or not isinstance(spec.datatype, str):
        raise TypeError("a tensor's name or type is not a string")
    numbers = 1
    for side in spec.shape[1:]:
        numbers *= max(side, 1)
    if numbers > _LARGEST or len(spec.shape) > 16:
        raise ValueError(f"`{spec.name[:60]}` has more than {_LARGEST:,} values per image")
