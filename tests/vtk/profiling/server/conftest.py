"""Small servers that speak KServe v2, written from its specification: no code of the client is in them."""

import contextlib
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

WEIGHT = np.random.default_rng(0).normal(size=(3 * 8 * 8, 5)).astype(np.float32)
"""The served model: flatten and one product."""


class Model:
    """What both protocols serve: one request at a time, each takes ``service_s``; counts as Triton does.

    Attributes:
        fault: of the logits, by the number of the request; may raise or sleep.
        tasks: whether there is an input ``task``; the answer is then multiplied by the task's length.
        inside: requests that are being worked on, or wait for it.
        spoil: writes an answer (handler, number of the request, head, raw) in its own way; False leaves it as it is.
        slow_paths: GET and POST paths, other than those of requests, that are answered a byte at a time.
    """

    def __init__(self) -> None:
        self.service_s = 0.002
        self.fault: Callable[[int, np.ndarray], np.ndarray] = lambda number, logits: logits
        self.tasks = False
        self.binary = True
        self.turn, self.lock = threading.Lock(), threading.Lock()
        self.count = self.images = self.queue_ns = self.compute_ns = self.seen = 0
        self.inside = 0
        self.spoil: Callable[[Any, int, bytes, bytes], bool] = lambda handler, number, head, raw: False
        self.slow_paths: tuple[str, ...] = ()
        self.bodies: set[bytes] = set()

    def run(self, images: np.ndarray, task: list[str] | None) -> np.ndarray:
        with self.lock:
            self.inside += 1
        try:
            return self._run(images, task)
        finally:
            with self.lock:
                self.inside -= 1

    def _run(self, images: np.ndarray, task: list[str] | None) -> np.ndarray:
        came = time.perf_counter_ns()
        with self.turn:
            begin = time.perf_counter_ns()
            with self.lock:
                self.seen += 1
                number = self.seen
            time.sleep(self.service_s)
            logits = images.astype(np.float32).reshape(len(images), -1) @ WEIGHT
            if task is not None:
                logits *= np.array([len(t) for t in task], np.float32)[:, None]
            logits = self.fault(number, logits)
            end = time.perf_counter_ns()
        with self.lock:
            self.count += 1
            self.images += len(images)
            self.queue_ns += begin - came
            self.compute_ns += end - begin
        return logits

    def stats(self) -> dict[str, Any]:
        third = self.compute_ns // 3
        parts = {"compute_input": third, "compute_infer": third, "compute_output": self.compute_ns - 2 * third}
        times = {"success": self.compute_ns + self.queue_ns, "queue": self.queue_ns, **parts}
        inference = {k: {"count": self.count, "ns": v} for k, v in times.items()}
        entry = {"name": "pets", "version": "2", "inference_count": self.images, "execution_count": self.count}
        return {"model_stats": [{**entry, "inference_stats": inference}]}

    def metadata(self) -> dict[str, Any]:
        inputs = [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, 8, 8]}]
        inputs += [{"name": "task", "datatype": "BYTES", "shape": [-1, 1]}] if self.tasks else []
        outputs = [{"name": "logits", "datatype": "FP32", "shape": [-1, 5]}]
        return {"name": "pets", "versions": ["1", "2"], "platform": "fake", "inputs": inputs, "outputs": outputs}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: Model

    def log_message(self, *_: Any) -> None: ...

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY: the client's times are of the server, not of Nagle

    def do_GET(self) -> None:
        extensions = ["binary_tensor_data"] if self.model.binary else []
        answers = {
            "/v2": {"name": "fake", "extensions": extensions},
            "/v2/models/pets": self.model.metadata(),
            "/v2/models/pets/versions/2/stats": self.model.stats(),
        }
        found = answers.get(self.path)
        self.reply({"error": f"unknown {self.path}"} if found is None else found, 200 if found else 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v2/repository/index":
            return self.reply(
                [{"name": "pets", "version": "2", "state": "READY"}, {"name": "old", "state": "UNAVAILABLE"}]
            )
        if self.path != "/v2/models/pets/versions/2/infer":
            return self.reply({"error": "no such model"}, 404)
        length = self.headers.get("Inference-Header-Content-Length")
        head = json.loads(body if length is None else body[: int(length)])
        offset, images, task = int(length or 0), None, None
        for tensor in head["inputs"]:
            if length is None:
                values = tensor["data"]
                if tensor["name"] == "task":
                    task = values
                else:
                    images = np.array(values, np.float32).reshape(tensor["shape"])
                continue
            size = tensor["parameters"]["binary_data_size"]
            data, offset = body[offset : offset + size], offset + size
            if tensor["name"] == "task":
                task = []
                while data:
                    (n,) = struct.unpack("<I", data[:4])
                    task.append(data[4 : 4 + n].decode())
                    data = data[4 + n :]
            else:
                images = np.frombuffer(data, "<f4").reshape(tensor["shape"])
        assert images is not None
        self.model.bodies.add(body)
        try:
            logits = self.model.run(images, task)
        except ValueError as error:
            return self.reply({"error": str(error)}, 400)
        entry: dict[str, Any] = {"name": "logits", "datatype": "FP32", "shape": list(logits.shape)}
        if length is None:
            return self.reply({"outputs": [{**entry, "data": logits.ravel().tolist()}]})
        raw = logits.astype("<f4").tobytes()
        head = {"outputs": [{**entry, "parameters": {"binary_data_size": len(raw)}}]}
        if not self.model.spoil(self, self.model.seen, json.dumps(head).encode(), raw):
            self.reply(head, raw=raw)

    def reply(self, value: Any, status: int = 200, raw: bytes | None = None) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        if raw is not None:
            self.send_header("Inference-Header-Content-Length", str(len(text)))
        self.send_header("Content-Length", str(len(text) + len(raw or b"")))
        self.end_headers()
        if self.path in self.model.slow_paths:
            return drip(self, text)
        self.wfile.write(text + (raw or b""))


def drip(handler: Any, data: bytes, pause_s: float = 0.05) -> None:
    """Send a byte at a time, each well within any timeout that is of one operation."""
    with contextlib.suppress(OSError):
        for i in range(len(data)):
            handler.wfile.write(data[i : i + 1])
            time.sleep(pause_s)


@pytest.fixture
def model() -> Model:
    return Model()


@contextlib.contextmanager
def serving(model: Model) -> Iterator[str]:
    handler = type("Serving", (Handler,), {"model": model})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def http_url(model: Model) -> Iterator[str]:
    with serving(model) as url:
        yield url


@pytest.fixture
def grpc_url(model: Model) -> Iterator[str]:
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("tritonclient.grpc")
    from concurrent.futures import ThreadPoolExecutor

    from google.protobuf.json_format import ParseDict
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ServerMetadata(self, request: Any, context: Any) -> Any:
            return service_pb2.ServerMetadataResponse(name="fake")

        def ModelMetadata(self, request: Any, context: Any) -> Any:
            if request.name != "pets":
                context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
            return ParseDict(model.metadata(), service_pb2.ModelMetadataResponse())

        def RepositoryIndex(self, request: Any, context: Any) -> Any:
            return ParseDict({"models": [{"name": "pets", "state": "READY"}]}, service_pb2.RepositoryIndexResponse())

        def ModelStatistics(self, request: Any, context: Any) -> Any:
            return ParseDict(model.stats(), service_pb2.ModelStatisticsResponse())

        def ModelInfer(self, request: Any, context: Any) -> Any:
            images = np.frombuffer(request.raw_input_contents[0], "<f4").reshape(request.inputs[0].shape)
            try:
                logits = model.run(images, None)
            except ValueError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            output = service_pb2.ModelInferResponse.InferOutputTensor(
                name="logits", datatype="FP32", shape=list(logits.shape)
            )
            raw = [logits.astype("<f4").tobytes()]
            return service_pb2.ModelInferResponse(model_name="pets", outputs=[output], raw_output_contents=raw)

    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)
