"""Servers that are right when idle and wrong when busy, each in its own way."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.profiling.server import drive, traffic
from vtk.profiling.server.config import ServerConfig
from vtk.profiling.server.connect import connect
from vtk.profiling.server.drive import profile_server
from vtk.profiling.server.pool import Pool
from vtk.profiling.server.result import ServerResult
from vtk.runtime.source import Source


@dataclass(frozen=True)
class Linear(Source):
    """What the fake servers serve, in torch."""

    def model(self) -> nn.Module:
        layer = nn.Linear(3 * 8 * 8, 5, bias=False)
        weight = np.random.default_rng(0).normal(size=(3 * 8 * 8, 5)).astype(np.float32)
        layer.weight.data = torch.from_numpy(weight.T.copy())
        return nn.Sequential(nn.Flatten(), layer).eval()


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(ModelSpec("linear"), InputSpec(8, 8), tuple("abcde"))
    monkeypatch.setattr(drive, "open_source", lambda *_, **__: Linear("checkpoint", "linear", None, card))
    monkeypatch.setattr(traffic, "WARMUP_S", 0.05)
    monkeypatch.setattr("socketserver.BaseServer.handle_error", lambda *_: None)


def run(url: str, **options: Any) -> ServerResult:
    values = {"concurrency": (4,), "duration": 0.15, "reference": "linear", "stability": 500.0, **options}
    return profile_server(ServerConfig(server=url, **values), show_progress=False)


def swapped(model: Any) -> Callable[[int, np.ndarray], np.ndarray]:
    """Answer with what the request before should have got, while others wait."""
    last: list[np.ndarray] = []

    def fault(number: int, logits: np.ndarray) -> np.ndarray:
        before = last[-1] if last and model.inside > 1 else logits
        last.append(logits)
        return before

    return fault


FAULTS: dict[str, tuple[Callable[[Any], Callable[[int, np.ndarray], np.ndarray]], str]] = {
    "off": (lambda model: lambda n, x: x * 1.1 if model.inside > 1 else x, "differs by"),
    "nan": (lambda model: lambda n, x: x * np.nan if model.inside > 1 and n % 3 == 0 else x, "NaN or infinite"),
    "another request's": (swapped, "the answer to the image of another request"),
    "shorter": (lambda model: lambda n, x: x[:, :4] if model.inside > 1 else x, "has shape (1, 4), expected (1, 5)"),
    "rows missing": (lambda model: lambda n, x: x[:0] if model.inside > 1 else x, "has shape (0, 5)"),
}


@pytest.mark.parametrize("reference,which", [
    *(("linear", which) for which in FAULTS), (None, "off"), (None, "another request's"),
])  # fmt: skip
def test_answers_that_are_wrong_when_requests_overlap_are_counted(
    model: Any, http_url: str, which: str, reference: str | None
) -> None:
    make, said = FAULTS[which]
    model.fault, model.service_s = make(model), 0.001
    result = run(http_url, reference=reference)
    (level,) = result.levels
    assert level.status == "mismatch" and result.exit_code == 4 and level.p50_ms is None
    assert 0 < level.wrong < level.checked
    assert f"under load {level.wrong} of " in level.reason and said in level.reason


def test_the_command_names_wrong_of_checked_and_ends_with_4(
    model: Any, http_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model.fault, model.service_s = FAULTS["off"][0](model), 0.001
    options = ["--concurrency", "1,4", "--duration", "0.15", "--stability", "500"]
    assert main(["profile", "--server", http_url, *options]) == 4
    said = capsys.readouterr().out
    assert "\\n" not in said, "a line end within a text is shown as one"
    out = " ".join(said.split())
    assert "batch 1, 4 clients: wrong answer, not timed: under load" in out and "checked answers are wrong" in out
    assert "batch 1, 1 client:" not in out  # alone it is right, and timed


def test_wrong_once_in_a_while_in_the_measured_window_alone(model: Any, http_url: str) -> None:
    """Idle checks and warm-up are over by then."""
    model.fault, model.service_s = (lambda n, x: -x if n > 60 and n % 4 == 0 else x), 0.002
    (level,) = run(http_url, concurrency=(1,), duration=0.6).levels
    assert level.status == "mismatch" and "under load" in level.reason and 0 < level.wrong < 0.6 * level.checked


def test_an_open_loop_is_checked_too(model: Any, http_url: str) -> None:
    model.fault, model.service_s = FAULTS["another request's"][0](model), 0.004
    (level,) = run(http_url, concurrency=(), rate=(400.0,), duration=0.3).levels
    assert level.status == "mismatch" and "another request" in level.reason


def test_a_server_that_is_one_answer_behind_is_wrong_without_a_reference_too(model: Any, http_url: str) -> None:
    """To one client it would look right if images always came in one order."""
    last: list[np.ndarray] = []

    def behind(number: int, logits: np.ndarray) -> np.ndarray:
        last.append(logits)
        return last[-2] if len(last) > 1 else logits

    model.fault, model.service_s = behind, 0.0005
    (level,) = run(http_url, concurrency=(1,), reference=None).levels
    assert level.status == "mismatch" and level.wrong == level.checked, "seen before any load"


def test_grpc_is_checked_too(model: Any, grpc_url: str) -> None:
    model.fault = FAULTS["another request's"][0](model)
    result = run(grpc_url, protocol="grpc", batch_sizes=(2,))
    assert result.levels[0].status == "mismatch" and result.exit_code == 4


def write(handler: Any, body: bytes, length: int | None = None, head: int | None = None) -> bool:
    handler.send_response(200)
    if head is not None:
        handler.send_header("Inference-Header-Content-Length", str(head))
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)
    return True


def when_busy(spoil: Callable[[Any, bytes, bytes], bool]) -> Callable[[Any, int, bytes, bytes], bool]:
    return lambda handler, number, head, raw: number > 20 and number % 2 == 0 and spoil(handler, head, raw)


@pytest.mark.parametrize("spoil,said", [
    (lambda h, head, raw: write(h, b"[]"), "the answer has no outputs: []"),
    (lambda h, head, raw: write(h, b'{"error": "out of memory"}'), 'no outputs: {"error": "out of memory"}'),
    (lambda h, head, raw: write(h, b"[" * 5000), "cannot be read (RecursionError"),
    (lambda h, head, raw: write(h, b'{"outputs": [7]}'), "cannot be read"),
    (lambda h, head, raw: write(h, b'{"outputs": [{"name": "other"}]}'), "no output `logits`"),
    (lambda h, head, raw: write(h, head + raw[:-4], head=len(head)), "its head says"),
    (lambda h, head, raw: write(h, head.replace(b"20}", b"-4}") + raw, head=len(head)), "its head says"),
    (lambda h, head, raw: write(h, head + raw, head=10**9), "cannot be read"),
], ids=["list", "error", "nested", "number", "other output", "truncated", "negative", "head too long"])  # fmt: skip
def test_an_answer_that_is_none_is_a_wrong_one(model: Any, http_url: str, spoil: Any, said: str) -> None:
    model.spoil, model.service_s = when_busy(spoil), 0.001
    result = run(http_url, duration=0.1)
    (level,) = result.levels
    assert level.status == "mismatch" and said in level.reason and result.exit_code == 4
    assert 0 < level.wrong < level.checked


def cut(handler: Any, head: bytes, raw: bytes) -> bool:
    write(handler, head + raw[:3], length=len(head) + len(raw), head=len(head))
    handler.close_connection = True
    return True


def twice(handler: Any, head: bytes, raw: bytes) -> bool:
    return write(handler, head + raw, head=len(head)) and write(handler, head + raw, head=len(head))


def test_an_answer_that_breaks_off_is_a_failure(model: Any, http_url: str) -> None:
    model.spoil, model.service_s = when_busy(cut), 0.001
    result = run(http_url, concurrency=(1,))
    assert result.exit_code == 1 and result.levels[0].failed > 3 and "IncompleteRead" in result.levels[0].reason


def test_an_answer_that_comes_twice_is_not_taken_for_the_next_one(model: Any, http_url: str) -> None:
    """The second copy is either seen before the next request, or read as its answer and found to be another's."""
    model.spoil, model.service_s = when_busy(twice), 0.001
    result = run(http_url, concurrency=(1,))
    text = f"{result.levels[0].reason} {result.warnings}"
    assert result.exit_code in (1, 4) and ("more than its answer" in text or "another request" in text)


def test_a_connection_that_the_server_closes_when_idle_is_made_again(model: Any, http_url: str) -> None:
    def close(handler: Any, number: int, head: bytes, raw: bytes) -> bool:
        handler.close_connection = True  # without saying so
        return write(handler, head + raw, head=len(head))

    model.spoil = close
    client = connect(http_url, "http", 5.0)
    info, pool = client.info("pets"), Pool(np.random.rand(4, 3, 8, 8).astype(np.float32))
    for number in range(3):
        assert client.decode(client.infer(client.request(info, pool, number, 2, {})), "logits").shape == (2, 5)
        time.sleep(0.05)
    client.close()


def test_a_cache_of_answers_is_never_hit(model: Any, http_url: str) -> None:
    known: dict[bytes, np.ndarray] = {}
    run_model = model._run

    def cached(images: np.ndarray, task: Any) -> np.ndarray:
        key = images.tobytes()
        if key not in known:
            known[key] = run_model(images, task)
        return known[key]

    model._run, model.service_s = cached, 0.005
    (level,) = run(http_url, concurrency=(1,), duration=0.3).levels
    assert level.status == "ok" and level.p50_ms is not None and level.p50_ms >= 5
    assert len(known) >= level.requests + traffic.IDLE


def test_a_server_that_needs_time_at_first_is_told(model: Any, http_url: str) -> None:
    def cold(number: int, logits: np.ndarray) -> np.ndarray:
        if number < 8:  # idle checks take four
            raise ValueError("model is loading")
        return logits

    model.fault = cold
    result = run(http_url, concurrency=(1,))
    assert result.exit_code == 1 and "model is loading" in result.levels[0].reason


@pytest.fixture
def dripping(model: Any) -> Iterator[None]:
    """Answers come a byte at a time, each sooner than the timeout."""

    def spoil(handler: Any, number: int, head: bytes, raw: bytes) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(head) + len(raw)))
        handler.end_headers()
        try:
            for i in range(len(head)):
                handler.wfile.write(head[i : i + 1])
                time.sleep(0.05)
        except OSError:
            pass
        return True

    model.spoil = spoil
    yield


def test_a_dripping_answer_is_too_late(model: Any, http_url: str, dripping: None) -> None:
    begin = time.perf_counter()
    (level,) = run(http_url, timeout=0.3).levels
    assert time.perf_counter() - begin < 2 and level.status == "failed"
    assert "timed out: no complete answer within 0.3 s" in level.reason


@pytest.mark.parametrize("path", ["/v2", "/v2/repository/index", "/v2/models/pets"])
def test_a_dripping_description_is_too_late(
    model: Any, http_url: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model.slow_paths = (path,)
    begin = time.perf_counter()
    code = main(["profile", "--server", http_url, "--timeout", "0.3", "--duration", "0.1"])
    assert time.perf_counter() - begin < 2
    assert code == (2 if path == "/v2/repository/index" else 5)
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_dripping_statistics_are_left_out(model: Any, http_url: str) -> None:
    model.slow_paths = ("/v2/models/pets/versions/2/stats",)
    begin = time.perf_counter()
    (level,) = run(http_url, timeout=0.3, concurrency=(1,)).levels
    assert time.perf_counter() - begin < 3 and level.status == "ok" and level.queue_ms is None


@pytest.mark.parametrize("answer", [b"[]", b"7", b"null", b'"x"', b'{"inputs": [7]}', b'{"inputs": [{"name": 1}]}',
                                    b'{"inputs": 3}', b"[" * 5000])  # fmt: skip
def test_a_description_that_is_none_is_one_line(
    model: Any, http_url: str, answer: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = json.dumps
    monkeypatch.setattr(model, "metadata", lambda: {"answer": 1})
    monkeypatch.setattr(json, "dumps", lambda value, **_: answer.decode() if value == {"answer": 1} else
                        original(value, **_))  # fmt: skip
    assert main(["profile", "--server", http_url, "--model", "pets"]) == 5
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "pets" in lines[0]


@pytest.mark.parametrize("server", ["http://[::1", "127.0.0.1:99999", "ftp://h:1", "a b:1", ":80", "http://"])
def test_an_address_that_is_none_is_refused(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--server", server]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "--server" in lines[0]


def test_a_host_that_has_no_address_is_exit_5(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--server", "x" * 70 + ".invalid:1", "--timeout", "3"]) == 5
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_slow_answer_of_grpc_is_too_late(model: Any, grpc_url: str) -> None:
    client = connect(grpc_url, "grpc", 0.4)
    model.service_s = 1.5
    (level,) = run(grpc_url, protocol="grpc", timeout=0.4).levels
    assert level.status == "failed" and "Deadline" in level.reason
    client.close()


def test_answers_of_another_shape_are_compared_with_the_servers_own(model: Any, http_url: str) -> None:
    """A server of maps, or of one number an image, is no classifier and still one that may be wrong when busy."""
    model.fault = lambda n, x: x.reshape(len(x), 5, 1, 1)
    assert run(http_url, reference=None, batch_sizes=(2,)).exit_code == 0
    model.fault = lambda n, x: (x if model.inside == 1 else -x)[:, 0]
    (level,) = run(http_url, reference=None).levels
    assert level.status == "mismatch" and "under load" in level.reason
