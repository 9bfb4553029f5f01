"""KServe v2 over HTTP with the standard library: one kept connection for each thread, tensors as bytes.

tritonclient's HTTP client was not taken: it runs on gevent, whose green threads would all share one processor thread
with the clock that times them.
"""

import http.client
import json
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any

import numpy as np

from vtk.errors import UnavailableError
from vtk.profiling.server.client import (
    NUMPY,
    Counters,
    ModelInfo,
    RequestFailed,
    TensorSpec,
    read_counters,
    unreachable,
)

_LENGTH = "Inference-Header-Content-Length"
_LOST = (OSError, http.client.HTTPException)


class HttpClient:
    """A server at ``host:port`` or an ``http`` or ``https`` URL.

    Raises:
        UnavailableError: nobody answers there.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        self.url, self.timeout = url, timeout
        self._secure, self._prefix = parts.scheme == "https", parts.path.rstrip("/")
        self._host, self._port = parts.hostname or "localhost", parts.port or (443 if self._secure else 8000)
        self._local = threading.local()
        self._all: list[http.client.HTTPConnection] = []
        try:
            meta = self._json("GET", "/v2")
        except (RequestFailed, *_LOST) as error:
            raise unreachable(url, error) from error
        # without this extension tensors are lists of numbers in JSON
        self.binary = "binary_tensor_data" in meta.get("extensions", [])

    def models(self) -> list[str]:
        """Return the names of the models that are ready (an extension of Triton's)."""
        try:
            found = self._json("POST", "/v2/repository/index", {})
        except RequestFailed:
            return []
        return [str(m["name"]) for m in found if m.get("state", "READY") == "READY"]

    def info(self, model: str) -> ModelInfo:
        """Describe a model."""
        try:
            found = self._json("GET", f"/v2/models/{urllib.parse.quote(model, safe='')}")
        except RequestFailed as error:
            raise UnavailableError(f"{self.url} has no model `{model}` that is ready ({error})") from error
        inputs, outputs = (
            tuple(TensorSpec(t["name"], t["datatype"], tuple(map(int, t["shape"]))) for t in found.get(key, []))
            for key in ("inputs", "outputs")
        )
        versions = [str(v) for v in found.get("versions") or [""]]
        return ModelInfo(model, max(versions, key=lambda v: (len(v), v)), found.get("platform", ""), inputs, outputs)

    def counters(self, info: ModelInfo) -> Counters | None:
        """Return the server's statistics (an extension of Triton's)."""
        try:
            return read_counters(self._json("GET", f"{_path(info)}/stats"), info.version)
        except RequestFailed:
            return None
        except _LOST:  # it has gone meanwhile: the requests will say so
            self._drop()
            return None

    def payload(self, info: ModelInfo, tensors: Mapping[str, "np.ndarray[Any, Any]"]) -> Any:
        """Return path, headers and body."""
        specs = {t.name: t.datatype for t in info.inputs}
        inputs, chunks = [], []
        for name, value in tensors.items():
            entry: dict[str, Any] = {"name": name, "datatype": specs[name], "shape": list(value.shape)}
            if self.binary:
                data = _texts(value) if specs[name] == "BYTES" else np.ascontiguousarray(value).tobytes()
                entry["parameters"] = {"binary_data_size": len(data)}
                chunks.append(data)
            else:
                entry["data"] = [str(v) if specs[name] == "BYTES" else v for v in value.ravel().tolist()]
            inputs.append(entry)
        request: dict[str, Any] = {"inputs": inputs}
        if self.binary:
            request["outputs"] = [{"name": o.name, "parameters": {"binary_data": True}} for o in info.outputs]
        head = json.dumps(request).encode()
        kind = "application/octet-stream" if self.binary else "application/json"
        headers = {"Content-Type": kind, **({_LENGTH: str(len(head))} if self.binary else {})}
        return f"{_path(info)}/infer", headers, b"".join([head, *chunks])

    def infer(self, payload: Any) -> Any:
        """Return the answer's headers and body."""
        path, headers, body = payload
        try:
            return self._send("POST", path, body, headers)
        except _LOST as error:
            self._drop()
            raise RequestFailed(f"{type(error).__name__}: {error}") from error

    def decode(self, answer: Any, output: str) -> "np.ndarray[Any, Any]":
        """Return one output of an answer."""
        headers, body = answer
        length = headers.get(_LENGTH)
        try:
            head = json.loads(body if length is None else body[: int(length)])
            offset = int(length or 0)
            for entry in head["outputs"]:
                size = entry.get("parameters", {}).get("binary_data_size")
                if entry["name"] == output:
                    if min(entry["shape"], default=0) < 0:
                        raise ValueError(f"shape {entry['shape']}")
                    kind = NUMPY[entry["datatype"]]
                    if size is None:
                        return np.array(entry["data"], kind).reshape(entry["shape"])
                    count = int(size) // np.dtype(kind).itemsize
                    return np.frombuffer(body, kind, count, offset).reshape(entry["shape"])
                offset += size or 0
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"the answer cannot be read ({error})") from error
        raise RequestFailed(f"the answer has no output `{output}`")

    def close(self) -> None:
        """Close the connections of all threads."""
        for connection in self._all:
            connection.close()

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        _, text = self._send(method, path, data, {"Content-Type": "application/json"})
        try:
            return json.loads(text)
        except ValueError as error:
            raise RequestFailed(f"{path} answers no JSON") from error

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[Any, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            connection = self._local.connection = kind(self._host, self._port, timeout=self.timeout)
            self._all.append(connection)
        connection.request(method, self._prefix + path, body, headers)
        response = connection.getresponse()
        text = response.read()
        if response.status >= 400:
            told = " ".join(text[:200].decode("utf-8", "replace").split())
            raise RequestFailed(f"{response.status} {response.reason}: {told}")
        return response.headers, text

    def _drop(self) -> None:
        """Forget this thread's connection: after an error its state is unknown."""
        if (connection := getattr(self._local, "connection", None)) is not None:
            connection.close()
        self._local.connection = None


def _path(info: ModelInfo) -> str:
    version = f"/versions/{info.version}" if info.version else ""
    return f"/v2/models/{urllib.parse.quote(info.name, safe='')}{version}"


def _texts(values: "np.ndarray[Any, Any]") -> bytes:
    """Encode texts as the protocol has it: four bytes of length before each."""
    coded = [str(value).encode() for value in values.ravel()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in coded)
