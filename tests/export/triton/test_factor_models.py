"""Models of many tasks in one graph that takes their factors: in Python, and in ONNX Runtime with factors inside."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import timm
import torch
from google.protobuf import text_format
from safetensors.torch import load_file, save_file
from tritonclient.grpc import model_config_pb2

from tests.export._fake_server import Load, request
from vtk.__main__ import main
from vtk.card import Card
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.packs import save_task
from vtk.packs.factors import Factors
from vtk.packs.synthetic import write_synthetic
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton

NAME, KWARGS, SIZE = "vit_tiny_patch16_224", {"depth": 1, "embed_dim": 32, "num_heads": 2}, 32
LOWEST = np.finfo(np.float32).min
CLASSES = {"a": 3, "b": 5, "c": 2, "a2": 4}


@dataclass
class Packs:
    """Packs of factors by name, of ranks from 0 to 7, and their base."""

    folders: dict[str, Path]
    base: Path

    def logits(self, name: str, pixels: np.ndarray) -> np.ndarray:
        """Those of timm's model with weights put together here: base + scale · b · a."""
        folder, start = self.folders[name], load_file(self.base)
        card, tensors = json.loads((folder / "task.json").read_text()), load_file(folder / "task.safetensors")
        state = {**start, **{k: v for k, v in tensors.items() if ":" not in k}}
        for key, fact in card["pack"]["factors"].items():
            if fact["rank"]:
                product = tensors[f"{key}:b"].double() @ tensors[f"{key}:a"].double()
                state[key] = start[key].double() + fact["scale"] * product.view(start[key].shape)
        model = timm.create_model(NAME, img_size=SIZE, num_classes=len(card["classes"]), **KWARGS).double().eval()
        model.load_state_dict(state)
        with torch.no_grad():
            found: np.ndarray = model(torch.from_numpy(pixels).double()).numpy()
        return found


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    root = tmp_path_factory.mktemp("factors")
    torch.manual_seed(1)
    save_file(timm.create_model(NAME, img_size=SIZE, **KWARGS).state_dict(), root / "base.safetensors")
    folders = {}
    for seed, (name, classes) in enumerate(CLASSES.items()):
        start = build_model(
            NAME, num_classes=classes, img_size=SIZE, weights=root / "base.safetensors", kwargs=dict(KWARGS)
        )
        folders[name] = write_synthetic(root / name, start, rank=[seed, 7 - seed, 2], seed=seed)
    folders["narrow"] = narrow(root / "narrow", start)
    return Packs(folders, root / "base.safetensors")


def narrow(folder: Path, start: Any) -> Path:
    """A pack that changes one matrix and the classifier alone."""
    name, generator = "blocks.0.attn.qkv.weight", torch.Generator().manual_seed(9)
    state = {key: value.clone() for key, value in start.model.state_dict().items()}
    factors = Factors.of(0.02 * torch.randn(state[name].shape, generator=generator), 3)
    state[name] += factors.change()
    state["head.weight"] += torch.randn(state["head.weight"].shape, generator=generator)
    card = Card(start.spec, start.input, tuple("wxyz"))
    save_task(folder, state=state, created=start, card=card, trained=[name, "head.weight"], factors={name: factors})
    return folder


def export(packs: Packs, repo: Path, tasks: dict[str, str], *, show: bool = False, **options: Any) -> Any:
    config = TritonConfig(out=repo, **{"backend": "python", "name": "m", "factor_dtype": "fp32", **options})
    named = {name: packs.folders[pack] for name, pack in tasks.items()}
    return export_triton(named, config, show=show, base=packs.base).models[0]


@pytest.fixture
def served(packs: Packs, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model of `a` and `b` as a server runs it."""
    made = export(packs, tmp_path / "models", {"a": "a", "b": "b"})
    assert (made.version, made.updated) == (1, False)
    monkeypatch.setattr(sys.modules["vtk_watch"], "POLL_S", 0.02)
    load("vtk_factors")
    model = load("factors_model").TritonPythonModel()
    model.initialize(
        {"model_repository": str(tmp_path / "models" / "m"), "model_version": "1", "model_name": "m",
         "model_config": json.dumps({"parameters": {"threads": {"string_value": "1"}}})}
    )  # fmt: skip
    yield model
    model.finalize()
    assert not model.watch.thread.is_alive()


@pytest.mark.slow
def test_packs_of_factors_are_one_graph_whose_tasks_change_while_it_serves(
    packs: Packs, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.random.default_rng(0).standard_normal((3, 3, SIZE, SIZE)).astype(np.float32)

    def ask(*tasks: str) -> Any:
        return served.execute([request(pixels[: len(tasks)], list(tasks))])[0]

    def check(tasks: dict[str, str]) -> bool:
        found = ask(*tasks)
        if found.error is not None:
            return False
        for i, (row, pack) in enumerate(zip(found.found["logits"], tasks.values(), strict=True)):
            wanted = packs.logits(pack, pixels[i : i + 1])[0]
            if not np.abs(row[: len(wanted)] - wanted).max() <= 1e-4 * np.abs(wanted).max():
                return False
            assert (row[len(wanted) :] == LOWEST).all()
        return True

    def until(tasks: dict[str, str]) -> None:
        limit = time.monotonic() + 30
        while not check(tasks):
            assert time.monotonic() < limit, str(ask(*tasks).error)
            time.sleep(0.02)

    assert check({"a": "a", "b": "b"}) and "unknown task 'c'" in str(ask("a", "c").error)
    # the graph is that of before, and not converted again
    monkeypatch.setattr("vtk_export.tasks.factor_build.convert", lambda *_, **__: pytest.fail("converted"))
    made = export(packs, tmp_path / "models", {"c": "c", "a": "a2"}, update=True, remove=("b",))
    assert (made.version, made.updated, list(made.tasks)) == (1, True, ["a", "c"])
    until({"c": "c", "a": "a2"})
    assert "unknown task 'b'; this model has 'a', 'c'" in str(ask("b").error)
    assert sorted(served.model.tasks) == sorted(served.watch.keys.values())
    layout = json.loads((tmp_path / "models" / "m" / "1" / "factors.json").read_text())
    assert list(layout["tasks"]) == ["a", "c"] and layout["sizes"]["classes"] == 4
    # of what was written from the last version's files, sizes and padding are those of an export of all tasks
    capsys.readouterr()
    made = export(packs, tmp_path / "models", {"b": "b"}, update=True, remove=("a",), show=True)
    assert "verified then" not in capsys.readouterr().out, "all tasks were compared again"
    written = [file for file in (tmp_path / "models" / "m").rglob("*") if file.is_file()]
    assert made.bytes == sum(file.stat().st_size for file in written)
    updated = json.loads((tmp_path / "models" / "m" / "1" / "factors.json").read_text())
    monkeypatch.setattr("vtk_export.triton.factor_models.update_factors", lambda *_, **__: False)
    made = export(packs, tmp_path / "models", {"b": "b", "c": "c"})
    whole = json.loads((tmp_path / "models" / "m" / "1" / "factors.json").read_text())
    assert (made.version, made.updated) == (1, True) and updated == whole
    made = export(packs, tmp_path / "models", {"narrow": "narrow"}, update=True, remove=("b", "c"))
    assert (made.version, made.updated) == (1, True), "tasks that change less fit the graph as it is"
    until({"narrow": "narrow"})
    monkeypatch.undo()
    other = export(packs, tmp_path / "models", {"a": "a2", "c": "c"}, factor_dtype="fp16")
    assert (other.version, other.updated) == (2, False), "stacks of another type are another graph"
    written = [file for file in (tmp_path / "models" / "m").rglob("*") if file.is_file()]
    new = [file for file in written if file.relative_to(tmp_path).parts[2] != "1"]
    assert other.bytes == sum(file.stat().st_size for file in new) and len(new) < len(written)


@pytest.mark.slow
def test_a_dense_pack_does_not_make_an_updated_model_one_of_many_graphs(packs: Packs, tmp_path: Path) -> None:
    repo = tmp_path / "models"
    export(packs, repo, {"a": "a", "b": "b"})
    start = build_model(NAME, num_classes=2, img_size=SIZE, weights=packs.base, kwargs=dict(KWARGS))
    state = {key: value + 0.1 if ".attn." in key else value for key, value in start.model.state_dict().items()}
    trained = {key for key in state if ".attn." in key} | start.initial.keys()
    dense = tmp_path / "dense"
    save_task(dense, state=state, created=start, card=Card(start.spec, start.input, ("x", "y")), trained=trained)
    mixed = Packs({**packs.folders, "dense": dense}, packs.base)
    with pytest.raises(UsageError, match=r"is a dense pack, .* or use --form files"):
        export(mixed, repo, {"b": "dense"}, update=True)
    assert [path.name for path in (repo / "m").iterdir() if path.name.isdigit()] == ["1"]
    with pytest.raises(UsageError, match="is one of --backend python, not vtk"):
        export(packs, repo, {"b": "c"}, update=True, backend="vtk", factor_dtype="fp16")
    made = export(packs, repo, {"b": "c"}, update=True)
    assert (made.version, made.updated) == (1, True)


@pytest.mark.slow
def test_a_graph_of_onnxruntime_has_the_factors_inside_and_tasks_by_number(
    packs: Packs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [f"{name}={packs.folders[name]}" for name in "abc"]
    argv = ["export", "triton", *sources, "--backend", "onnxruntime", "--form", "factors", "--factor-dtype", "fp32"]
    argv += ["--name", "m", "--out", str(tmp_path / "models"), "--base", str(packs.base)]
    assert main([*argv, "--json"]) == 0
    assert "--input-data zero" in json.loads(capsys.readouterr().out)["models"][0]["commands"][1]
    folder = tmp_path / "models" / "m"
    config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    task = next(entry for entry in config.input if entry.name == "task")
    assert (list(task.dims), list(task.reshape.shape), task.HasField("reshape")) == ([1], [], True)
    session = ort.InferenceSession(folder / "1" / config.default_model_filename)
    assert [value.name for value in session.get_inputs()] == ["pixel_values", "task"]
    pixels = np.random.default_rng(0).standard_normal((4, 3, SIZE, SIZE)).astype(np.float32)
    numbers = json.loads((folder / "client.json").read_text())["task_numbers"]
    order = ["c", "a", "b"]
    sent = np.array([*(numbers[name] for name in order), 3], np.int32)
    logits, classes = session.run(["logits", "num_classes"], {"pixel_values": pixels, "task": sent})
    for row, name, image in zip(logits, order, pixels, strict=False):
        wanted = packs.logits(name, image[None])[0]
        assert np.abs(row[: len(wanted)] - wanted).max() <= 1e-4 * np.abs(wanted).max()
        assert (row[len(wanted) :] == LOWEST).all()
    assert np.isnan(logits[3]).all() and classes.tolist() == [2, 3, 5, 0]
    made = export(
        packs, tmp_path / "models", {"c": "a2"}, backend="onnxruntime", form="factors", update=True, remove=("a",),
        input_name=("x", "task=number"), output_name="scores",
    )  # fmt: skip
    assert (made.version, made.updated, list(made.tasks)) == (2, False, ["b", "c"])
    session = ort.InferenceSession(folder / "2" / config.default_model_filename)
    found = session.run(["scores"], {"x": pixels[:1], "number": np.int32([0])})[0][0]
    wanted = packs.logits("b", pixels[:1])[0]
    assert np.abs(found[: len(wanted)] - wanted).max() <= 1e-4 * np.abs(wanted).max()
    capsys.readouterr()


def test_a_task_s_new_file_is_bound_before_its_old_one_is_let_go(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a graph of a few lines: logits are a file's number times an image's sum."""
    events: list[str] = []
    failing: set[str] = set()

    class FactorModel:
        def __init__(self, folder: Path, *, threads: int | None, tasks: tuple[str, ...]) -> None:
            assert (threads, tasks) == (2, ())
            self.tasks: dict[str, Any] = {}

        def add(self, key: str, file: Path) -> None:
            if file.name in failing:
                raise ValueError("it is damaged")
            events.append(f"add {key}")
            task = {"classes": ("x", "y"), "shape": (1, 2, 2), "factor": float(file.read_text())}
            self.tasks[key] = type("Task", (), task)

        def remove(self, key: str) -> None:
            events.append(f"remove {key}")
            del self.tasks[key]

        def run(self, batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            sums = {key: x.sum((1, 2, 3)) * self.tasks[key].factor for key, x in batches.items()}
            return {key: np.stack([value, -value], 1) for key, value in sums.items()}

    monkeypatch.setitem(sys.modules, "vtk_factors", type("module", (), {"FactorModel": FactorModel}))
    monkeypatch.setattr(sys.modules["vtk_watch"], "POLL_S", 3600)
    folder = tmp_path / "1"
    folder.mkdir()

    def write(**tasks: float) -> None:
        for name, value in tasks.items():
            (folder / f"{name}.file").write_text(str(value))
        entries = {name: {"file": f"{name}.file", "digest": f"of {value}"} for name, value in tasks.items()}
        (folder / "new").write_text(json.dumps({"tasks": entries}))
        (folder / "new").replace(folder / "tasks.json")

    write(a=1, b=10)
    model = load("factors_model").TritonPythonModel()
    config = json.dumps({"parameters": {"threads": {"string_value": "2"}}})
    model.initialize({"model_repository": str(tmp_path), "model_version": "1", "model_config": config})
    sent = request(np.ones((2, 1, 2, 2)), ["b", "a"])
    assert model.execute([sent])[0].found["logits"].tolist() == [[40, -40], [4, -4]]
    events.clear()
    failing.add("c.file")
    write(a=2, c=5)
    assert model.watch.index.due() and "it is damaged" in model.watch._follow()[0]
    assert events == ["remove b of 10", "add a of 2", "remove a of 1"]
    failing.clear()
    assert model.watch._follow() == []
    assert "unknown task 'b'; this model has 'a', 'c'" in str(model.execute([sent])[0].error)
    sent = request(np.ones((2, 1, 2, 2)), ["c", "a"])
    assert model.execute([sent])[0].found["logits"].tolist() == [[20, -20], [8, -8]]
    model.finalize()
    assert model.counters.totals["vtk_task_images", "a"] == 2 and model.counters.totals["vtk_task_failures", "a"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "vtk", "--form", "factors"], "a form is one of ONNX files"),
        (["--form", "factors", "--int8", "dynamic"], "--form factors"),
        (["--form", "factors", "--profile", "1"], "take images alone"),
        (["--update", "--profile", "1"], "take images alone"),
        (["--backend", "onnxruntime", "--form", "factors", "--softmax"], "different numbers of classes"),
        (["--backend", "onnxruntime", "--form", "factors", "--with-preproc"], "by name, not by number"),
    ],
)
def test_options_that_do_not_go_with_the_form_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["export", "triton", "a=x", "b=y", "--out", str(tmp_path / "models"), *words]) == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1, message
