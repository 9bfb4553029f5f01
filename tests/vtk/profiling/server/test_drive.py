"""``vtk profile --server`` against servers whose service time, queue and answers are known."""

import json
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UnavailableError, UsageError
from vtk.profiling.server import drive, traffic
from vtk.profiling.server.config import ServerConfig
from vtk.profiling.server.connect import connect
from vtk.profiling.server.drive import profile_server
from vtk.profiling.server.report import page
from vtk.profiling.server.result import ServerLevel, ServerResult
from vtk.runtime.source import Source

WEIGHT = np.random.default_rng(0).normal(size=(3 * 8 * 8, 5)).astype(np.float32)
"""As of the fake servers."""


@dataclass(frozen=True)
class Linear(Source):
    """What the fake servers serve, in torch."""

    def model(self) -> nn.Module:
        layer = nn.Linear(3 * 8 * 8, 5, bias=False)
        layer.weight.data = torch.from_numpy(WEIGHT.T.copy())
        return nn.Sequential(nn.Flatten(), layer).eval()


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(ModelSpec("linear"), InputSpec(8, 8), tuple("abcde"))
    monkeypatch.setattr(drive, "open_source", lambda *_, **__: Linear("checkpoint", "linear", None, card))
    monkeypatch.setattr(traffic, "WARMUP_S", 0.05)


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(protocol: str, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{protocol}_url"))


def run(url: str, **options: Any) -> ServerResult:
    values = {"concurrency": (1,), "duration": 0.3, "reference": "linear", "stability": 500.0, **options}
    return profile_server(ServerConfig(server=url, **values), show_progress=False)


def test_closed_loop_times_are_those_of_the_service(model, protocol: str, url: str) -> None:
    model.service_s = 0.01
    result = run(url, protocol=protocol, concurrency=(1, 4), batch_sizes=(3,), duration=0.5)
    one, four = result.levels
    assert (result.model, result.version, result.platform) == ("pets", "2", "fake")
    assert one.status == four.status == "ok" and one.max_diff < 1e-4
    assert 10 <= one.p50_ms < 25 and one.queue_ms < 3 and 10 <= one.compute_ms < 20
    # one at a time: of four clients each waits for the other three
    assert 38 <= four.p50_ms < 80 and 25 <= four.queue_ms < 60 and 10 <= four.compute_ms < 20
    assert one.images_per_second <= 300 and four.images_per_second <= 300
    assert one.server_batch == pytest.approx(3) and result.exit_code == 0


def test_open_loop_beyond_what_the_server_can_do_is_seen(model, http_url: str) -> None:
    model.service_s = 0.01
    calm, flood = run(http_url, concurrency=(), rate=(20.0, 200.0), duration=0.6).levels
    assert calm.loop == flood.loop == "open" and calm.rate == 20
    assert 10 <= calm.mean_ms < 40
    assert flood.mean_ms > 100 and flood.requests_per_second < 105  # 100 a second is all that it can do


@pytest.mark.parametrize("fault,said", [
    (lambda number, logits: logits + 1, "4 of 4 checked answers are wrong, the first differs by 1"),
    (lambda number, logits: logits[:, :4], "shape"),
    (lambda number, logits: logits if number < 20 else logits * 2, "not timed: under load "),
], ids=["off", "class missing", "right at first"])  # fmt: skip
def test_wrong_answers_get_no_number(model, http_url: str, fault, said: str) -> None:
    model.fault = fault
    (level,) = run(http_url).levels
    assert level.status == "mismatch" and said in level.reason
    assert level.p50_ms is None and level.requests == 0 and level.images_per_second is None
    assert run(http_url).exit_code == 4


def test_a_reference_of_another_size_is_refused(http_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(ModelSpec("linear"), InputSpec(16, 8), tuple("abcde"))
    monkeypatch.setattr(drive, "open_source", lambda *_, **__: Linear("checkpoint", "other", None, card))
    with pytest.raises(UsageError, match="`pets` takes images of 3×8×8, --reference other of 3×16×8"):
        run(http_url)


def test_what_is_printed_is_wrapped_without_escapes(http_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--server={http_url}", "--concurrency", "1", "--duration", "0.3", "--reference", "linear"]
    main(["profile", *argv, "--budget-ms", "0.0001"])
    printed = capsys.readouterr().out
    assert "answers:" in printed and "\\n" not in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_without_a_reference_it_says_so_and_still_counts_rows(model, http_url: str) -> None:
    result = run(http_url, reference=None)
    assert result.levels[0].status == "ok" and result.levels[0].max_diff is None
    assert result.reference.startswith("not compared")
    model.fault = lambda number, logits: logits[:1]
    assert run(http_url, reference=None, batch_sizes=(2,)).levels[0].status == "mismatch"


def test_failed_requests_are_told(model, protocol: str, url: str) -> None:
    def sometimes(number: int, logits: np.ndarray) -> np.ndarray:
        if number > 20 and number % 3 == 0:
            raise ValueError("out of memory on the card")
        return logits

    model.fault = sometimes
    result = run(url, protocol=protocol)
    (level,) = result.levels
    assert level.failed >= 3 and "out of memory on the card" in level.reason
    assert result.exit_code == 1 and "requests failed" in result.warnings[0]


def test_no_two_requests_are_equal(model, http_url: str) -> None:
    run(http_url, batch_sizes=(2,), duration=0.1)
    assert len(model.bodies) == model.seen > 30


def test_a_server_without_binary_tensors_gets_json(model, http_url: str) -> None:
    model.binary = False
    assert run(http_url, duration=0.1).levels[0].status == "ok"
    assert all(body.startswith(b"{") and b"data" in body for body in model.bodies)


def test_a_model_for_many_tasks(model, http_url: str) -> None:
    model.tasks = True
    with pytest.raises(UsageError, match="give --task"):
        run(http_url)
    assert run(http_url, task="x", duration=0.1).levels[0].status == "ok"  # one letter: the logits times one
    assert run(http_url, task="é", duration=0.1).levels[0].status == "ok"
    assert run(http_url, task="xx", duration=0.1).levels[0].status == "mismatch"


@pytest.mark.parametrize("which", ["http", "grpc"])
def test_nobody_there_is_exit_5(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    if which == "grpc":
        pytest.importorskip("tritonclient.grpc")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
    assert main(["profile", "--server", url, "--protocol", which, "--timeout", "1"]) == 5
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and f"no server answers at {url}" in lines[0]


def test_a_model_that_is_not_there_is_exit_5(protocol: str, url: str) -> None:
    with pytest.raises(UnavailableError, match="no model `cars`"):
        run(url, protocol=protocol, model="cars")
    client = connect(url, protocol, 5.0)
    assert client.models() == ["pets"]
    client.close()


def test_command_writes_json_and_a_page(
    model, http_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--concurrency", "1,2", "--rate", "50", "--duration", "0.2", "--budget-ms", "500", "--out", str(out)]
    assert main(["profile", f"--server={http_url}", *options, "--reference", "linear", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [level["loop"] for level in found["levels"]] == ["closed", "closed", "open"]
    assert json.loads((out / "server.json").read_text())["levels"] == found["levels"]
    text = (out / "server.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in text and "no coordinated omission" in text and "<script" not in text
    assert "pets version 2, fake at" in captured.err


def level(batch: int, clients: int, p99: float | None, rate: float, **more: Any) -> ServerLevel:
    return ServerLevel(batch, "closed", clients, requests=2000, p50_ms=5.0, p90_ms=8.0, p99_ms=p99,
                       images_per_second=rate, **more)  # fmt: skip


RESULT = ServerResult(
    "h:1", "http", "<b>pets</b>", "1", "onnxruntime", "torch", "images", 10.0,
    (
        level(1, 1, 9.0, 100.0), level(8, 4, 19.0, 900.0), level(8, 16, 30.0, 1500.0),
        level(16, 4, 10.0, 999.0, failed=3),
    ),
    budget_ms=20.0,
)  # fmt: skip


def test_budget_picks_batch_and_concurrency_by_p99_and_skips_failures() -> None:
    assert (
        RESULT.budget
        == "budget 20 ms: batch 8 with 4 clients meets it with the most images/s: p99 19.00 ms, 900.0 images/s"
    )
    assert "no load meets it; the nearest is batch 1 with 1 client: p99 9.00" in replace(RESULT, budget_ms=1.0).budget
    assert replace(RESULT, budget_ms=None).budget == ""


def test_page_escapes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtk.profiling.server.report.png", lambda result: b"")  # it is drawn elsewhere
    assert "<b>pets" not in page(RESULT) and "&lt;b&gt;pets" in page(RESULT)


@pytest.mark.parametrize("options,said", [
    ({"server": " "}, "host:port"), ({"batch_sizes": (0,)}, "batch-sizes"), ({"concurrency": (2, 2)}, "concurrency"),
    ({"concurrency": ()}, "nothing to do"), ({"rate": (0.0,)}, "rate"), ({"timeout": 0.0}, "timeout"),
    ({"duration": float("inf")}, "duration"), ({"budget_ms": 0.0}, "budget-ms"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ServerConfig(**{"server": "h:1", **options})
