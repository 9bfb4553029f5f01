"""Answers of anything that listens on a port: whatever they hold, one line and no traceback."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from vtk import __main__
from vtk.errors import UnavailableError, UsageError, VtkError
from vtk.profiling.server.client import RequestFailed
from vtk.profiling.server.connect import choose_model, connect
from vtk.profiling.server.pool import Pool

META = {"name": "x", "extensions": []}
INFO = {
    "name": "m", "versions": ["1"], "platform": "p",
    "inputs": [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, 8, 8]}],
    "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}],
}  # fmt: skip
ROWS = {"name": "logits", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}
ODD: list[Any] = [
    [], None, 7, "x", True, [[]], {}, [None], {"models": 3}, {"outputs": None}, {"inputs": [3], "outputs": 4}, 1e308,
    "[" * 5000, "not json", "", "\ufeff{}", "9" * 5000, '{"a": NaN}', b"\xff\xfe", b"\0" * 100,
]  # fmt: skip


class Stub:
    """A server whose answers are set by path."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"/v2": META, "/v2/models/m": INFO, "infer": {"outputs": [ROWS]}, "stats": {}}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # heads and body in one packet

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.rpartition("/")[2] if self.path.endswith(("infer", "stats")) else self.path
                value = stub.answers.get(path, [])
                text = value if isinstance(value, str) else json.dumps(value) if not isinstance(value, bytes) else ""
                body = value if isinstance(value, bytes) else text.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def stub() -> Iterator[Stub]:
    found = Stub()
    yield found
    found.server.shutdown()
    found.server.server_close()


def one_line(error: BaseException) -> None:
    assert "\n" not in str(error) and len(str(error)) < 600  # the console escapes what a server says


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://[",
        "host:port",
        "http://host:99999",
        "host:-1",
        "http://",
        "http://a]b",
        "h\x1b[31m:1",
        "x\ny",
        ":0",
    ],
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_what_is_no_address_is_a_usage_error(url: str, protocol: str) -> None:
    with pytest.raises(UsageError, match=r"`--server` .* is not a valid address") as caught:
        connect(url, protocol, 1.0)
    one_line(caught.value)


def test_the_command_ends_with_one_line(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    for answer in ([], None, "[" * 5000):
        stub.answers["/v2"] = answer
        assert __main__.main(["profile", "--server", stub.url]) == UnavailableError.exit_code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and ("as KServe's protocol has it" in lines[0] or "no server answers" in lines[0])
    assert __main__.main(["profile", "--server", "http://[::1"]) == UsageError.exit_code


def test_odd_answers_to_every_request_are_one_line(stub: Stub) -> None:
    for path in ("/v2", "/v2/repository/index", "/v2/models/m", "stats", "infer"):
        whole = stub.answers.get(path)
        for answer in ODD:
            stub.answers[path] = answer
            try:
                client = connect(stub.url, "http", 5.0)
                info = choose_model(client, "" if path == "/v2/repository/index" else "m")
                assert client.counters(info) is None or path != "stats"
                assert info.image().name
                payload = client.request(info, Pool(np.zeros((8, 3, 8, 8), np.float32)), 0, 2, {})
                assert client.decode(client.infer(payload), info.logits()).shape == (2, 3)
                client.close()
            except (VtkError, RequestFailed) as error:
                one_line(error)
        stub.answers[path] = whole
        if whole is None:
            del stub.answers[path]


@pytest.mark.parametrize(
    "change",
    [
        {"datatype": "FP33"},
        {"datatype": None},
        {"shape": [2, 4]},
        {"shape": [-1, 3]},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": []},
        {"shape": "x"},
        {"shape": [2.5, 3]},
        {"data": ["NaN", "x", 3, 4, 5, 6]},
        {"data": [1, 2]},
        {"data": []},
        {"data": None},
        {"data": {"a": 1}},
        {"data": [[1, 2, 3], [4, 5]]},
        {"data": [10**400] * 6},
        {"name": None},
        {"parameters": 3},
        {"parameters": {"binary_data_size": 1 << 40}},
        {"parameters": {"binary_data_size": "x"}},
        {"parameters": {"binary_data_size": -8}},
        {"shape": [], "data": 7},
    ],
)
def test_an_answer_that_is_not_its_shape_failed(stub: Stub, change: dict[str, Any]) -> None:
    stub.answers["infer"] = {"outputs": [ROWS | change]}
    client = connect(stub.url, "http", 5.0)
    info = client.info("m")
    with pytest.raises(RequestFailed) as caught:
        client.decode(client.infer(client.request(info, Pool(np.zeros((8, 3, 8, 8), np.float32)), 0, 2, {})), "logits")
    one_line(caught.value)
    client.close()


@pytest.mark.parametrize(
    "spec",
    [
        {"name": None, "datatype": "FP32", "shape": [1]},
        {"name": "a", "datatype": 5, "shape": [1]},
        {"name": "a"},
        {"name": "a", "datatype": "FP32", "shape": [-1, 3, 1 << 20, 1 << 20]},
        {"name": "a", "datatype": "FP32", "shape": [None]},
        {"name": "a", "datatype": "FP32", "shape": [10**400]},
        {"name": "a", "datatype": "FP32", "shape": ["x"]},
        {"name": "a", "datatype": "FP32", "shape": [1e999]},
        {"name": "a", "datatype": "FP32", "shape": [-1, 10**400]},
    ],
)
def test_a_description_of_no_images_is_refused(stub: Stub, spec: dict[str, Any]) -> None:
    stub.answers["/v2/models/m"] = INFO | {"inputs": [spec]}
    with pytest.raises((UnavailableError, UsageError)) as caught:
        connect(stub.url, "http", 5.0).info("m").image()
    one_line(caught.value)
