"""Answers of a server that speaks KServe's protocol, or should."""

import json
import math
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.mutators import flip
from tests.fuzz.reader import JSON, Reader, check_line

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


def _make_answers(folder: Path) -> None:
    for name, value in _ANSWERS.items():
        (folder / name).write_text(json.dumps(value))
    head = {
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24}}]
    }
    text = json.dumps(head).encode()
    (folder / "infer.bin").write_bytes(f"{len(text):4}".encode() + text + np.arange(6, dtype=np.float32).tobytes())


def _read_answers(folder: Path, file: Path) -> None:
    from vtk.profiling.server import http_client
    from vtk.profiling.server.client import RequestFailed, choose_model
    from vtk.profiling.server.guard import GuardedClient
    from vtk.profiling.server.pool import Pool
    from vtk.profiling.server.wire import Reply
    from vtk.readers import reading

    infer = "infer.bin" if file.name == "infer.bin" else "infer.json"

    class Answering(http_client.HttpClient):
        def _exchange(self, method: str, parts: Any, timeout: float) -> Reply:
            path = bytes(parts[0]).split(b" ", 2)[1].decode()
            name = {"/v2": "v2.json", "/v2/repository/index": "index.json"}.get(
                path, "stats.json" if path.endswith("stats") else infer if path.endswith("infer") else "model.json"
            )
            headers, body = Message(), (folder / name).read_bytes()
            if name == "infer.bin":
                headers[http_client._LENGTH] = body[:4].decode("latin-1")
                body = body[4:]
            return Reply(200, "OK", headers, body)

        def __init__(self) -> None:
            super().__init__("127.0.0.1:1", 1.0)

    from vtk.errors import UnavailableError

    with reading("the server", "does not answer", "is it one?", UnavailableError):
        client = GuardedClient(Answering(), "127.0.0.1:1")
    try:
        info = choose_model(client, "")
        info.image()
        counters = client.counters(info)
        assert counters is None or all(isinstance(value, int) for value in vars(counters).values())
        request = client.request(info, Pool(np.zeros((2, 3, 8, 8), np.float32)), 0, 2, {})
        rows = client.decode(client.infer(request), info.logits())
        assert rows.ndim >= 1 and np.asarray(rows, np.float32) is not None
        math.prod(rows.shape)
    except RequestFailed as error:
        check_line(error)


READERS = {
    "answers": Reader(900, _make_answers, _read_answers, {".json": JSON, ".bin": (flip,)}),
}
