"""KServe v2 over HTTP with the standard library: one persistent connection per thread, binary tensors.

tritonclient's HTTP client was not taken: it runs on gevent, whose green threads would all share one processor thread
with the clock that times them.
"""

import http.client
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

import numpy as np

from vtk.errors import UnavailableError
from vtk.profiling.server.client import (
    MALFORMED,
    NUMPY,
    Counters,
    ModelInfo,
    RequestFailed,
    model_info,
    read_counters,
    unreachable,
)
from vtk.profiling.server.config import split_server
from vtk.profiling.server.pool import Pool
from vtk.profiling.server.wire import Reply, Wire, resolve

_LENGTH = "Inference-Header-Content-Length"
_LOST = (OSError, http.client.HTTPException)


class HttpClient:
    """A server at ``host:port`` or an ``http`` or ``https`` URL.

    Raises:
        UnavailableError: nobody answers there.
    """

    def __init__(self, url: str, timeout: float) -> None:
        place = split_server(url)
        self.url, self.timeout, self._prefix = url, timeout, place.prefix
        port = place.port or (443 if place.secure else 8000)
        name = f"[{place.host}]" if ":" in place.host else place.host
        self._host = f"{name}:{port}"
        self._tls = (place.host, ssl.create_default_context()) if place.secure else None
        self._local = threading.local()
        self._all: list[Wire] = []
        self._heads: dict[Any, tuple[bytes, list[bytes]]] = {}
        self._known: dict[tuple[bytes, str], tuple[int, int, str, list[int]]] = {}
        self._texts: dict[int, bytes] = {}
        start = time.perf_counter()
        try:
            self._addresses = resolve(place.host, port, timeout)
            meta = self._json("GET", "/v2", timeout=timeout - (time.perf_counter() - start))
            if not isinstance(meta, dict):
                raise RequestFailed(f"/v2 is answered by no description: {_short(json.dumps(meta).encode())}")
            # without this extension tensors are lists of numbers in JSON
            self.binary = "binary_tensor_data" in (meta.get("extensions") or [])
        except (RequestFailed, *_LOST, *MALFORMED) as error:
            raise unreachable(url, _reason(error)) from error

    def models(self) -> list[str]:
        """Return the names of the models that are ready (an extension of Triton's)."""
        try:
            found = self._json("POST", "/v2/repository/index", {})
            return [str(m["name"]) for m in found if m.get("state", "READY") == "READY"]
        except (RequestFailed, *_LOST, *MALFORMED):
            return []

    def info(self, model: str) -> ModelInfo:
        """Describe a model."""
        try:
            return model_info(model, self._json("GET", f"/v2/models/{urllib.parse.quote(model, safe='')}"))
        except (RequestFailed, *_LOST) as error:
            raise UnavailableError(f"{self.url} has no model `{model}` that is ready ({_reason(error)})") from error

    def counters(self, info: ModelInfo) -> Counters | None:
        """Return the server's statistics (an extension of Triton's)."""
        try:
            return read_counters(self._json("GET", f"{_path(info)}/stats"), info.version)
        except (RequestFailed, *_LOST, *MALFORMED):  # gone meanwhile: the requests will say so
            return None

    def request(self, info: ModelInfo, pool: Pool, number: int, batch: int, texts: Mapping[str, str]) -> Any:
        """Return the pieces of a request, head first."""
        key = (info.name, batch, *texts.items())
        if (known := self._heads.get(key)) is None:
            known = self._heads[key] = self._head(info, pool, batch, texts)
        head, after = known
        if self.binary:
            return [head, *pool.parts(number, batch), *after]
        data = b",".join(self._numbers(pool, row, number) for row in pool.rows(number, batch).tolist())
        body = b"".join((after[0], data, after[1]))
        return [head.replace(b"\0", str(len(body)).encode()), body]

    def infer(self, request: Any) -> Any:
        """Return the length of the answer's head, and the answer."""
        try:
            reply = self._exchange("POST", request, self.timeout)
        except _LOST as error:
            raise RequestFailed(_reason(error)) from error
        return reply.headers.get(_LENGTH), reply.body

    def decode(self, answer: Any, output: str) -> "np.ndarray[Any, Any]":
        """Return one output of an answer."""
        length, body = answer
        try:
            end = len(body) if length is None else int(length)
            head = body[:end]
            if length is None or (known := self._known.get((head, output))) is None:
                value = json.loads(head)
                if not isinstance(value, dict) or "outputs" not in value:
                    raise RequestFailed(f"the answer has no outputs: {_short(head)}")
                offset = end
                for entry in value["outputs"]:
                    size = entry.get("parameters", {}).get("binary_data_size")
                    if entry["name"] == output:
                        break
                    offset += size or 0
                else:
                    raise RequestFailed(f"the answer has no output `{output}`")
                if min(entry["shape"], default=0) < 0:
                    raise ValueError(f"shape {entry['shape']}")
                if size is None:
                    return np.array(entry["data"], NUMPY[entry["datatype"]]).reshape(entry["shape"])
                known = (offset, int(size), entry["datatype"], entry["shape"])
                if len(self._known) < 256:  # the head of most answers is the same
                    self._known[head, output] = known
            offset, size, kind, shape = known
            if size < 0 or offset < end or len(body) < offset + size:
                raise RequestFailed(f"the answer ends after {len(body)} bytes, its head says {offset + size}")
            dtype = NUMPY[kind]
            return np.frombuffer(body, dtype, size // np.dtype(dtype).itemsize, offset).reshape(shape)
        except MALFORMED as error:
            raise RequestFailed(f"the answer cannot be read ({type(error).__name__}: {_short(body)})") from error

    def close(self) -> None:
        """Close the connections of all threads."""
        for wire in self._all:
            wire.close()

    def _head(self, info: ModelInfo, pool: Pool, batch: int, texts: Mapping[str, str]) -> tuple[bytes, list[bytes]]:
        """Return HTTP's and the protocol's head of such requests, and what goes after the images.

        Without binary tensors the head has a zero byte for the body's length, and body is what goes around the images.
        """
        image = info.image()
        size = pool.images.nbytes // len(pool) * batch
        entry = {"name": image.name, "datatype": image.datatype, "shape": [batch, *pool.images.shape[1:]]}
        inputs: list[dict[str, Any]] = [{**entry, "parameters": {"binary_data_size": size}} if self.binary else entry]
        after = []
        for name, text in texts.items():
            shape = next([batch, *(1 for _ in t.shape[1:])] for t in info.inputs if t.name == name)
            more: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": shape}
            if self.binary:
                # four bytes of length before each
                coded = text.encode()
                after.append((len(coded).to_bytes(4, "little") + coded) * batch)
                more["parameters"] = {"binary_data_size": len(after[-1])}
            else:
                more["data"] = [text] * batch
            inputs.append(more)
        request: dict[str, Any] = {"inputs": inputs}
        if not self.binary:
            inputs[0]["data"] = []
            before, _, rest = json.dumps(request).encode().partition(b'"data": []')
            head = self._http("POST", f"{_path(info)}/infer", "application/json", "\0")
            return head, [before + b'"data": [', b"]" + rest]
        request["outputs"] = [{"name": o.name, "parameters": {"binary_data": True}} for o in info.outputs]
        told = json.dumps(request).encode()
        length = str(len(told) + size + sum(map(len, after)))
        head = self._http(
            "POST", f"{_path(info)}/infer", "application/octet-stream", length, f"{_LENGTH}: {len(told)}\r\n"
        )
        return head + told, after

    def _numbers(self, pool: Pool, row: int, number: int) -> bytes:
        """Return an image as numbers in JSON; all but its marked values are written once."""
        kind = pool.images.dtype
        if row not in self._texts:
            rest = pool.images[row].reshape(-1)[pool.marked :].tolist()
            self._texts[row] = b"".join(b"," + repr(value).encode() for value in rest)
        first = np.frombuffer(pool.mark(row, number), kind).tolist()
        text = ",".join(map(repr, first)).encode() + self._texts[row]
        return text.removeprefix(b",")

    def _http(self, method: str, path: str, kind: str, length: str, more: str = "") -> bytes:
        lines = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}\r\nAccept-Encoding: identity\r\n"
        return f"{lines}Content-Type: {kind}\r\n{more}Content-Length: {length}\r\n\r\n".encode()

    def _json(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        head = self._http(method, path, "application/json", str(len(data)))
        reply = self._exchange(method, [head, data] if data else [head], self.timeout if timeout is None else timeout)
        try:
            return json.loads(reply.body)
        except MALFORMED as error:
            raise RequestFailed(f"{path} answers no JSON") from error

    def _exchange(self, method: str, parts: Any, timeout: float) -> Reply:
        wire = getattr(self._local, "wire", None)
        if wire is None:
            wire = self._local.wire = Wire(self._addresses, self._tls)
            self._all.append(wire)
        reply = wire.exchange(method, parts, timeout)
        if not 200 <= reply.status < 300:
            raise RequestFailed(f"{reply.status} {reply.reason}: {_short(reply.body)}")
        return reply


def _path(info: ModelInfo) -> str:
    version = f"/versions/{urllib.parse.quote(info.version, safe='')}" if info.version else ""
    return f"/v2/models/{urllib.parse.quote(info.name, safe='')}{version}"


def _short(text: bytes) -> str:
    return " ".join(text[:200].decode("utf-8", "replace").split())


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (RequestFailed, TimeoutError)) and text else f"{type(error).__name__}: {text}"
