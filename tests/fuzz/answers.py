"""Answers of a server that speaks KServe's protocol, or should."""

import json
import socket
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.mutators import flip
from tests.fuzz.reader import JSON, Reader, check_line
from vtk.errors import UnavailableError

_ANSWERS = {
    "v2.json": {"name": "triton", "version": "2.50", "extensions": ["binary_tensor_data", "statistics"]},
    "index.json": [{"name": "m", "version": "1", "state": "READY"}],
    "model.json": {
        "name": "m",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, 8, 8]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}],
    },
    "stats.json": {
        "model_stats": [
            {
                "name": "m",
                "version": "1",
                "inference_count": "5",
                "execution_count": 5,
                "inference_stats": {
                    "success": {"count": 5, "ns": 100},
                    "queue": {"count": 5, "ns": 10},
                    "compute_infer": {"count": 5, "ns": 1},
                },
            }
        ]
    },
    "infer.json": {
        "model_name": "m",
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}],
    },
}


_PATHS = {"/v2": "v2", "/v2/repository/index": "index", "stats": "stats", "infer": "infer"}


def _make_answers(folder: Path) -> None:
    for name, value in _ANSWERS.items():
        (folder / name).write_text(json.dumps(value))
    rows = {"name": "logits", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24}}
    head = json.dumps({"outputs": [rows]}).encode()
    for name, more, body in (
        ("infer", f"Inference-Header-Content-Length: {len(head)}", head + np.arange(6, dtype=np.float32).tobytes()),
        ("model", "X: y", json.dumps(_ANSWERS["model.json"]).encode()),
        ("stats", "Transfer-Encoding: chunked", b'5\r\n{"a":\r\n3\r\n 1}\r\n0\r\n\r\n'),
    ):
        length = "" if "chunked" in more else f"Content-Length: {len(body)}\r\n"
        (folder / f"{name}.http").write_bytes(f"HTTP/1.1 200 OK\r\n{length}{more}\r\n\r\n".encode() + body)


def _read_answers(folder: Path, file: Path) -> None:
    from vtk.profiling.server.client import RequestFailed
    from vtk.profiling.server.connect import choose_model
    from vtk.profiling.server.guard import GuardedClient
    from vtk.profiling.server.http_client import HttpClient
    from vtk.profiling.server.pool import Pool
    from vtk.profiling.server.wire import Reply, Wire
    from vtk.readers import reading

    class Answering(HttpClient):
        def _exchange(self, method: str, parts: Any, timeout: float) -> Reply:
            path = parts[0].split(b" ")[1].decode()
            name = _PATHS.get(path, _PATHS.get(path.rpartition("/")[2], "model"))
            raw = folder / f"{name}.http"
            if file != raw:  # whole heads are left out, so that the bodies of other files are damaged too
                body = (folder / f"{name}.json").read_bytes()
                return Reply(200, "OK", Message(), body)
            near, far = socket.socketpair()
            far.sendall(raw.read_bytes()[:100_000])
            far.close()
            wire = Wire([])
            wire._connect = lambda: near  # type: ignore[method-assign]
            wire._send = lambda parts: None  # type: ignore[method-assign]
            reply = wire.exchange(method, parts, timeout)
            if not 200 <= reply.status < 300:
                raise RequestFailed(f"{reply.status}")
            return reply

    with reading("the server", "does not answer", "is it one?", UnavailableError):
        client = GuardedClient(Answering("127.0.0.1:1", 1.0), "127.0.0.1:1")
    try:
        info = choose_model(client, "" if file.name.startswith("index") else "m")
        counters = client.counters(info)
        assert counters is None or all(isinstance(value, int) for value in vars(counters).values())
        assert info.image().name
        request = client.request(info, Pool(np.zeros((8, 3, 8, 8), np.float32)), 0, 2, {})
        rows = client.decode(client.infer(request), info.logits())
        assert rows.ndim >= 1 and rows.dtype.kind in "fiub" and rows.size < 1 << 20
    except RequestFailed as error:
        check_line(error)


READERS = {
    "answers": Reader(900, _make_answers, _read_answers, {".json": JSON, ".http": (flip,)}),
}
