"""Faulty clients and broken files at the models that a server runs: others get their answers, and it is said."""

import dataclasses
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.export._fake_server import Load, TritonError, request
from vtk.card import InputSpec
from vtk.packs.load import load_task
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton


@pytest.fixture
def rows(load: Load) -> Any:
    return sys.modules["vtk_rows"]


@pytest.fixture
def said(load: Load) -> list[str]:
    found: list[str] = sys.modules["triton_python_backend_utils"].Logger.said
    return found


def tasks_of(rows: Any) -> Any:
    return {name: rows.Task((f"{name}0", f"{name}1"), (1, 2, 2)) for name in "ab"}


def images(*values: float) -> np.ndarray:
    return np.stack([np.full((1, 2, 2), value, np.float32) for value in values])


def sums(batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3))], 1) for name, x in batches.items()}


def spot(value: float) -> np.ndarray:
    found = images(5, 6)
    found[1, 0, 1, 0] = value
    return found


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(images(np.nan), ["a"]), "image 1 of 1 holds NaN or infinite"),
        (request(spot(np.nan), ["a", "b"]), "image 2 of 2 holds NaN or infinite"),
        (request(spot(-np.inf), ["b", "a"]), "image 2 of 2 holds NaN or infinite"),
        (request(images(1, 3e38), ["a", "a"]), "image 2 of 2: its values are too large"),
        (request(np.zeros((0, 1, 2, 2)), []), "one image or more"),
        (request(np.zeros((2, 2)), ["a", "a"]), "one image or more"),
        (request(images(1), ["\x1b[31mred\0"]), r"unknown task '\\x1b\[31mred\\x00'"),
        (request(images(1), ["x" * 10_000]), "unknown task 'xxx"),
        ({}, "NoneType"),
    ],
    ids=["NaN", "one NaN", "one infinite", "too large", "no image", "axes", "escapes", "long", "no inputs"],
)
def test_a_faulty_request_gets_an_error_and_the_others_their_answers(rows: Any, bad: Any, message: str) -> None:
    found = rows.answer([request(images(1), ["a"]), bad, request(images(2, 3), ["b", "a"])], tasks_of(rows), sums)
    assert found[0].found["logits"].tolist() == [[4, -4]] and found[0].found["label"].tolist() == [[b"a0"]]
    assert found[2].found["logits"].tolist() == [[8, -8], [12, -12]]
    assert not found[1].found
    with pytest.raises(TritonError, match=message):
        raise found[1].error
    assert str(found[1].error).isprintable() and len(str(found[1].error)) < 1100


def test_of_a_call_that_fails_only_the_request_at_fault_is_told_so(rows: Any, said: list[str]) -> None:
    """A model that raises for some values, as an allocator does for some sizes."""

    def run(batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if any((x == 13).any() for x in batches.values()):
            raise MemoryError("no\x1b[2J room\0\udcff")
        return sums(batches)

    sent = [request(images(value), ["a"]) for value in (1, 13, 2)] + [request(images(3, 13), ["b", "a"])]
    found = rows.answer(sent, tasks_of(rows), run)
    assert [response.found["logits"][0, 0] for response in found if response.found] == [4, 8]
    assert [str(response.error) for response in found if response.error] == [r"task 'a': no\x1b[2J room\x00\udcff"] * 2
    assert len(said) == 1 and r"no\x1b[2J room" in said[0]


ARGS = {"model_name": "m", "model_version": "1", "model_instance_kind": "CPU",
        "model_config": json.dumps({"parameters": {}})}  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_failure_is_tried_again_more_and_more_rarely_and_another_file_at_once(
    load: Load, said: list[str], tmp_path: Path
) -> None:
    clock, path = Clock(), tmp_path / "tasks.json"
    index = sys.modules["vtk_index"].Index(path, ARGS, clock)
    assert index.due() and not index.due(), "an attempt that is under way is not made again"
    waits = []
    for _ in range(9):
        index.done(2, ["it is broken"])
        start = clock.now
        while not index.due():
            clock.now += 0.5
        waits.append(clock.now - start)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60] and len(said) == index.failures == 9
    assert "m: it is broken; 2 tasks are served, the next attempt is in 1 s" in said[0]
    index.done(2, ["it is broken"])
    path.write_text("{}")
    assert index.due(), "another file is looked at without waiting"
    index.done(3, [])
    clock.now += 1000
    assert not index.due() and "followed again, 3 tasks" in said[-1]


def test_metrics_say_what_is_served_and_a_server_without_them_serves_too(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[tuple[str, str], float] = {}

    class Value:
        def __init__(self, name: str, labels: dict[str, str]) -> None:
            self.key = name, labels["model"]

        def set(self, value: float) -> None:
            values[self.key] = value

    class Family:
        GAUGE = 1

        def __init__(self, name: str, description: str, kind: int) -> None:
            self.name = name

        def Metric(self, labels: dict[str, str]) -> Value:
            return Value(self.name, labels)

    index = sys.modules["vtk_index"].Index(tmp_path / "tasks.json", ARGS)
    assert index.due()
    index.done(1, ["no metrics here"])
    monkeypatch.setattr(sys.modules["triton_python_backend_utils"], "MetricFamily", Family, raising=False)
    index = sys.modules["vtk_index"].Index(tmp_path / "tasks.json", ARGS)
    assert index.due()
    index.done(2, ["a", "b"])
    assert values["vtk_tasks", "m"] == 2 and values["vtk_tasks_wrong", "m"] == 2
    assert values["vtk_index_failures", "m"] == 1 and abs(values["vtk_index_looked_seconds", "m"] - time.time()) < 60


@pytest.fixture(scope="module")
def repository(packed: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a bank of three tasks; not to be changed."""
    config = TritonConfig(out=tmp_path_factory.mktemp("repository") / "models", backend="vtk", name="m")
    export_triton(
        [f"{name}={packed.path}" for name in "pqr"], config, show=False, base=packed.path.parent / "base.safetensors"
    )
    return config.out


@pytest.fixture
def bank(load: Load, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bank as a server runs it, of the task `p`; its index also lists `q` and `r` where ``both`` is written."""
    shutil.copytree(repository, tmp_path / "models")
    module = load("bank_model")
    monkeypatch.setattr(sys.modules["vtk_watch"], "POLL_S", 0.02)
    model = module.TritonPythonModel()
    path = tmp_path / "models" / "m" / "1" / "tasks.json"
    model.both = json.loads(path.read_text())
    model.write = lambda index: (
        path.with_name("new").write_text(json.dumps(index)),
        path.with_name("new").replace(path),
    )
    model.write({**model.both, "tasks": {"p": model.both["tasks"]["p"]}})
    model.initialize({**ARGS, "model_repository": str(tmp_path / "models" / "m")})
    model.watch.index._clock = lambda: 100 * time.monotonic()
    yield model
    model.finalize()
    assert not model.watch.thread.is_alive()


def until(right: Callable[[], object]) -> None:
    limit = time.monotonic() + 30
    while not right():
        assert time.monotonic() < limit
        time.sleep(0.005)


ENDS = (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), AttributeError("x"), SystemExit(1))


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_whatever_ends_an_attempt_the_bank_goes_on_and_tries_again(
    bank: Any, said: list[str], packed: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    pixels = torch.randn(1, 3, 32, 48)
    add, faults = bank.bank.add, [error]

    def fail_once(*args: Any) -> None:
        if faults:
            raise faults.pop()
        add(*args)

    monkeypatch.setattr(bank.bank, "add", fail_once)
    bank.write(bank.both)
    until(lambda: said)
    # a task behind the one that failed comes with the same attempt
    assert bank.watch.thread.is_alive() and f"{2 - isinstance(error, SystemExit)} tasks are served" in said[0]
    assert bank.execute([request(pixels.numpy(), ["p"])])[0].error is None
    until(lambda: "q" in bank.watch.tasks)
    with torch.no_grad():
        wanted = load_task(packed.path).model(pixels).numpy()
    assert np.allclose(bank.execute([request(pixels.numpy(), ["q"])])[0].found["logits"], wanted, atol=1e-4)
    until(lambda: "followed again, 3 tasks" in said[-1])


def test_an_attempt_that_ended_between_two_steps_is_no_obstacle_to_the_next(
    bank: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, faults = bank.watch._change, [MemoryError("no room")]

    def fail_once(*args: Any) -> None:
        if faults:
            raise faults.pop()
        change(*args)

    monkeypatch.setattr(bank.watch, "_change", fail_once)
    bank.write(bank.both)
    until(lambda: len(bank.watch.tasks) == 3)
    assert "no room" in said[0] and len(bank.bank.tasks) == 3


def test_a_pack_whose_weights_are_not_those_of_its_digest_is_not_served(bank: Any, said: list[str]) -> None:
    """A third of them is zero, as after a copy that broke off; when the copy is whole it is served."""
    file = bank.watch.index.path.parent / "packs" / "q" / "task.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: -len(whole) // 3] + bytes(len(whole) - len(whole[: -len(whole) // 3])))
    bank.write(bank.both)
    until(lambda: "r" in bank.watch.tasks and said)  # the line comes after all tasks
    assert "q" not in bank.watch.tasks and "task 'q'" in said[0] and "is damaged, or not copied yet" in said[0]
    file.write_bytes(whole)
    until(lambda: "q" in bank.watch.tasks)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_an_index_or_a_pack_that_is_a_pipe_holds_up_nobody(bank: Any, said: list[str]) -> None:
    index = bank.watch.index.path
    index.unlink()
    os.mkfifo(index)
    until(lambda: said and "no plain file" in said[0])
    weights = index.parent / "packs" / "q" / "task.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    bank.write(bank.both)
    until(lambda: "r" in bank.watch.tasks)
    assert any("task 'q'" in line and "no plain file" in line for line in said)


def test_a_watch_that_has_ended_starts_again_with_the_next_request(bank: Any, said: list[str]) -> None:
    bank.watch.thread = threading.Thread(target=int)
    bank.watch.thread.start()
    bank.watch.thread.join()
    assert bank.execute([request(np.zeros((1, 3, 32, 48)), ["p"])])[0].error is None
    assert bank.watch.thread.is_alive() and "nobody looked" in said[0]


@pytest.mark.parametrize("broken", ["{", "[]", '{"tasks": []}', '{"tasks": {"a": {}}}', "[" * 3000, '{"tasks": {}}'])
def test_a_broken_index_fails_no_request_for_images_and_is_said(
    load: Load, said: list[str], tmp_path: Path, broken: str
) -> None:
    load("vtk_images")
    path = tmp_path / "1" / "tasks.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"tasks": {"a": dataclasses.asdict(InputSpec(8, 8))}}))
    model = load("preprocess_model").TritonPythonModel()
    model.initialize({**ARGS, "model_repository": str(tmp_path)})
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "PNG")
    names = request(np.zeros((1, 1)), ["a"])["task"]
    sent = {"encoded": type(names)("encoded", np.array([[file.getvalue()]], dtype=np.object_)), "task": names}
    path.write_text(broken)
    for _ in range(3):
        assert model.execute([sent])[0].error is None
    assert len(said) == 1 and "cannot be read" in said[0] and "1 tasks are served" in said[0]
    model.finalize()


def test_the_client_names_no_class_of_an_answer_that_is_no_number(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load("vtk_images")
    client = load("client")
    task = {"input": dataclasses.asdict(InputSpec(8, 8)), "classes": ["cat", "dog"]}
    about = {"input": "pixel_values", "static_batch": 0, "tasks": {"pets": task}}
    (tmp_path / "client.json").write_text(json.dumps(about))
    photos = [tmp_path / f"{i}.png" for i in range(2)]
    for path in photos:
        Image.new("RGB", (8, 8)).save(path)
    rows = np.array([[np.nan, np.nan], [1, 3]], np.float32)
    monkeypatch.setattr(client, "__file__", str(tmp_path / "client.py"))
    monkeypatch.setattr(client, "infer", lambda *_: {"logits": rows})
    monkeypatch.setattr(sys, "argv", ["client.py", *map(str, photos)])
    with pytest.raises(SystemExit, match=r"0\.png: the model's answer is not a number"):
        client.main()
    assert capsys.readouterr().out == f"{photos[1]}: dog (88.1 %)\n"


def run_client(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch, infer: Callable[..., Any], **task: Any
) -> None:
    load("vtk_images")
    client = load("client")
    about = {
        "input": "pixel_values",
        "static_batch": 0,
        "tasks": {"pets": {"input": dataclasses.asdict(InputSpec(8, 8)), "classes": ["cat", "dog"], **task}},
    }
    (folder / "client.json").write_text(json.dumps(about))
    Image.new("RGB", (8, 8)).save(folder / "0.png")
    monkeypatch.setattr(client, "__file__", str(folder / "client.py"))
    monkeypatch.setattr(client, "infer", infer)
    monkeypatch.setattr(sys, "argv", ["client.py", str(folder / "0.png")])
    client.main()


@pytest.mark.parametrize("logits,said", [
    ([1, 3], "dog (95.3 %), cat (73.1 %)"), ([-1, 3], "dog (95.3 %)"), ([-1, -900], "none of the classes"),
])  # fmt: skip
def test_the_client_names_every_label_of_a_model_of_several(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    logits: list[float], said: str,
) -> None:  # fmt: skip
    found = {"logits": np.array([logits], np.float32)}
    run_client(load, tmp_path, monkeypatch, lambda *_: found, multi_label=True)
    assert capsys.readouterr().out == f"{tmp_path / '0.png'}: {said}\n"


def test_what_a_transport_quotes_of_a_server_is_harmless(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infer(*_: Any) -> None:
        raise ConnectionError("bad status \x1b[2J\x9b")

    with pytest.raises(SystemExit) as ended:
        run_client(load, tmp_path, monkeypatch, infer)
    assert str(ended.value).isprintable() and r"\x1b[2J\x9b" in str(ended.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_raw_values_of_which_none_is_finite_are_no_image(load: Load, value: float) -> None:
    """Some pixels without a value are mapped as in training; an image of nothing else would be a black one."""
    code = load("vtk_images")
    spec = {**dataclasses.asdict(InputSpec(8, 8)), "decoding": "srgb", "value_range": [(0.0, 1.0)] * 3}
    image = np.full((9, 9, 3), value, np.float32)
    with pytest.raises(code.Unreadable, match="no finite value"):
        code.from_array(image, spec)
    image[4] = 0.5
    assert code.from_array(image, spec).size == (9, 9)


def test_an_export_over_a_broken_index_repairs_the_bank_that_runs(bank: Any, packed: Any, tmp_path: Path) -> None:
    (tmp_path / "models" / "m" / "1" / "tasks.json").write_text("{")
    config = TritonConfig(out=tmp_path / "models", backend="vtk", name="m")
    sources = [f"{name}={packed.path}" for name in "ps"]
    made = export_triton(sources, config, show=False, base=packed.path.parent / "base.safetensors").models[0]
    assert (made.version, made.updated) == (1, True)
    until(lambda: set(bank.watch.tasks) == {"p", "s"})
