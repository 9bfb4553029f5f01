"""The models that a server runs, with the server's module replaced by a few lines; and the repository of a bank."""

import dataclasses
import hashlib
import io
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image
from safetensors.torch import load_file

from tests.export._fake_server import Load, Response, Tensor, TritonError, request
from vtk.__main__ import main
from vtk.card import InputSpec, from_plain
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.packs.load import load_task
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton

LOWEST = np.finfo(np.float32).min


@pytest.fixture
def rows(load: Load) -> Any:
    return sys.modules["vtk_rows"]


def tasks_of(rows: Any) -> Any:
    return {"a": rows.Task(("a0", "a1", "é"), (1, 2, 2)), "b": rows.Task(("b0",), (1, 2, 2))}


def weigh(batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logits from which row, image and task can be told."""
    return {
        name: np.stack(
            [x[:, 0, 0, 0] * (k + 1) * (1 if name == "a" else -1) for k in range(3 if name == "a" else 1)], 1
        )
        for name, x in batches.items()
    }


def images(*values: float) -> np.ndarray:
    return np.stack([np.full((1, 2, 2), value, np.float32) for value in values])


def test_every_image_of_a_task_is_in_one_batch_and_every_row_goes_back_to_its_place(rows: Any) -> None:
    calls = []

    def run(batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append({name: x[:, 0, 0, 0].tolist() for name, x in batches.items()})
        return weigh(batches)

    sent = [request(images(1, 2, 3), ["a", "b", "a"]), request(images(4), ["b"]), request(images(5, 6), ["a", "a"])]
    found = rows.answer(sent, tasks_of(rows), run)
    assert calls == [{"a": [1, 3, 5, 6], "b": [2, 4]}]
    assert found[0].found["logits"].tolist() == [[1, 2, 3], [-2, LOWEST, LOWEST], [3, 6, 9]]
    assert found[1].found["logits"].tolist() == [[-4, LOWEST, LOWEST]]
    assert found[2].found["logits"].tolist() == [[5, 10, 15], [6, 12, 18]]
    assert found[0].found["label"].tolist() == [["é".encode()], [b"b0"], ["é".encode()]]
    share = np.exp([1.0, 2.0, 3.0])
    assert found[0].found["score"][0, 0] == pytest.approx(share[2] / share.sum(), rel=1e-6)
    assert found[1].found["score"][0, 0] == 1


def test_shares_in_place_of_logits_sum_to_one(rows: Any) -> None:
    found = rows.answer([request(images(1, 2), ["b", "a"])], tasks_of(rows), weigh, softmax=True)[0].found
    share = np.exp([2.0, 4.0, 6.0])
    assert sorted(found) == ["label", "probabilities", "score"]
    np.testing.assert_allclose(found["probabilities"], [[1, 0, 0], share / share.sum()], rtol=1e-6)
    assert found["score"][:, 0].tolist() == found["probabilities"].max(1).tolist()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (request(images(1), ["c"]), "unknown task 'c'; this model has 'a', 'b'"),
        (request(images(1), ["a\n\xff"]), "unknown task"),
        (request(np.zeros((1, 1, 2, 3)), ["a"]), r"images of task 'a' are \(1, 2, 2\)"),
        (request(images(1, 2), ["a"]), "2 images"),
    ],
    ids=["task", "bytes", "shape", "count"],
)
def test_a_bad_request_is_answered_alone(rows: Any, bad: Any, said: str) -> None:
    found = rows.answer([request(images(1), ["a"]), bad, request(images(2), ["b"])], tasks_of(rows), weigh)
    assert found[0].found["logits"].tolist() == [[1, 2, 3]] and found[2].found["logits"][0, 0] == -2
    with pytest.raises(TritonError, match=said):
        raise found[1].error
    assert found[1].error.code == TritonError.INVALID_ARG and not found[1].found


def test_a_task_that_fails_takes_no_other_with_it(rows: Any) -> None:
    def run(batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if "b" in batches:
            raise RuntimeError("out of\nmemory")
        return weigh(batches)

    sent = [request(images(1), ["a"]), request(images(2), ["b"]), request(images(3, 4), ["a", "b"])]
    found = rows.answer(sent, tasks_of(rows), run)
    assert found[0].found["logits"].tolist() == [[1, 2, 3]]
    assert str(found[1].error) == str(found[2].error) == "task 'b': out of memory"


def write_tasks(version: Path, factors: dict[str, float]) -> dict[str, Path]:
    """Write files whose logits are a product with one matrix for all, times a factor, and their index."""
    version.mkdir(parents=True)
    common = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    index: dict[str, Any] = {"tasks": {}, "session_options": {"session.disable_prepacking": "1"}}
    for name, factor in factors.items():
        image = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 1, 8, 8])
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
        own = np.full((128, 3), factor, np.float32)
        weights = [onnx.numpy_helper.from_array(common, "common"), onnx.numpy_helper.from_array(own, "own")]
        nodes = [
            helper.make_node("Flatten", ["pixel_values"], ["flat"]),
            helper.make_node("MatMul", ["flat", "common"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "own"], ["logits"]),
        ]
        model = helper.make_model(
            helper.make_graph(nodes, "g", [image], [logits], weights), ir_version=10,
            opset_imports=[helper.make_opsetid("", 18)],
        )  # fmt: skip
        onnx.save(model, version / f"{name}.onnx")
        index["tasks"][name] = {"file": f"{name}.onnx", "classes": ["x", "y", "z"], "in_chans": 1, "height": 8,
                                "width": 8}  # fmt: skip
    (version / "tasks.json").write_text(json.dumps(index))
    return {name: version / f"{name}.onnx" for name in factors}


@pytest.mark.parametrize("packed_weights", [True, False])
def test_the_model_on_onnxruntime_runs_each_task_s_own_file(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed_weights: bool
) -> None:
    write_tasks(tmp_path / "m" / "1", {"a": 1.0, "b": -2.0})
    if not packed_weights:
        (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("VTK_PREPACKED", str(tmp_path / "cache"))
    model = load("tasks_model").TritonPythonModel()
    config = json.dumps({"parameters": {"threads": {"string_value": "1"}}})
    model.initialize(
        {"model_repository": str(tmp_path / "m"), "model_version": "1", "model_config": config, "model_name": "m"}
    )
    pixels = np.random.default_rng(1).standard_normal((2, 1, 8, 8)).astype(np.float32)
    found = model.execute([request(pixels, ["b", "a"])])[0].found["logits"]
    model.finalize()
    common = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    sums = (pixels.reshape(2, 64).astype(np.float64) @ common).sum(1)
    assert np.allclose(found, [[-2 * sums[0]] * 3, [sums[1]] * 3], rtol=1e-4)
    said = sys.modules["triton_python_backend_utils"].Logger.said
    assert len(said) == (0 if packed_weights else 1)


def test_packed_weights_are_kept_once_for_all_tasks_and_made_once(load: Load, tmp_path: Path) -> None:
    import onnxruntime as ort

    prepack = sys.modules["vtk_prepack"]
    files = write_tasks(tmp_path / "m", {"a": 1.0, "b": -2.0, "c": 3.0})
    made = prepack.prepare(files, tmp_path / "cache")
    folder = made["a"].parent
    common = 64 * 128 * 4
    weights = (folder / "weights").stat().st_size
    assert 2 * common <= weights < 2 * common + 9 * 2 * 4096, "raw and packed once, not for each of three tasks"
    pixels = np.random.default_rng(1).standard_normal((3, 1, 8, 8)).astype(np.float32)
    for name, path in made.items():
        plain, packed = (
            ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]).run(None, {"pixel_values": pixels})[0]
            for p in (files[name], path)
        )
        assert np.array_equal(plain, packed)
    times = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert prepack.prepare(files, tmp_path / "cache") == made
    assert times == {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    files["c"].write_bytes(files["b"].read_bytes())
    assert prepack.prepare(files, tmp_path / "cache")["a"].parent != folder
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_packed_weights_of_other_data_beside_a_model_are_made_anew(load: Load, tmp_path: Path) -> None:
    """Two packs of one architecture have equal graphs: what differs lies in ``model.onnx.data``."""
    prepack = sys.modules["vtk_prepack"]
    found = {}
    for factor in (1.0, 2.0):
        version = tmp_path / str(factor)
        (path,) = write_tasks(version, {"a": factor}).values()
        onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="model.onnx.data")
        found[factor] = path.read_bytes(), prepack.prepare({"a": path}, tmp_path / "cache")["a"]
    (graph, made), (same, other) = found.values()
    assert graph == same and made != other
    weights = [(path.parent / "weights").read_bytes() for path in (made, other)]
    assert weights[0] != weights[1]


def test_files_that_are_not_those_of_the_index_are_not_served(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTK_PREPACKED", str(tmp_path / "cache"))
    version = tmp_path / "m" / "1"
    files = write_tasks(version, {"a": 1.0})
    index = json.loads((version / "tasks.json").read_text())
    index["sha256"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files.values()}
    (version / "tasks.json").write_text(json.dumps(index))
    told = {"model_repository": str(tmp_path / "m"), "model_version": "1", "model_config": "{}", "model_name": "m"}
    load("tasks_model").TritonPythonModel().initialize(told)
    data = files["a"].read_bytes()
    files["a"].write_bytes(data[:2000] + bytes(4000) + data[6000:])
    with pytest.raises(ValueError, match=r"a\.onnx is damaged or absent"):
        load("tasks_model").TritonPythonModel().initialize(told)


def test_what_is_no_external_tensor_stays_byte_for_byte(load: Load) -> None:
    """The walk through protobuf's fields changes places only: of a graph without any, nothing."""
    prepack = sys.modules["vtk_prepack"]
    attribute = helper.make_node("Constant", [], ["c"], value_floats=[0.1, -3e30], doc_string="é")
    weights = [onnx.numpy_helper.from_array(np.arange(300, dtype=np.int64), "w")]
    model = helper.make_model(helper.make_graph([attribute], "g", [], [], weights), producer_name="p" * 200)
    raw = model.SerializeToString()
    assert prepack.move(raw, lambda offset, length: pytest.fail("nothing to move")) == raw


class Images:
    """A model that prepares images, loaded as a server does, of tasks `a` (8×8) and `b` (8×12), and its index."""

    def __init__(self, load: Load, root: Path) -> None:
        load("vtk_images")
        self.specs = {
            "a": dataclasses.asdict(InputSpec(8, 8)),
            "b": dataclasses.asdict(InputSpec(8, 12, mean=(0.1, 0.2, 0.3), resize_mode="pad")),
        }
        self.index = root / "1" / "tasks.json"
        self.index.parent.mkdir(parents=True)
        self.write(self.specs)
        self.model = load("preprocess_model").TritonPythonModel()
        config = json.dumps({"parameters": {"threads": {"string_value": "2"}}})
        self.model.initialize({"model_repository": str(root), "model_version": "1", "model_config": config})

    def write(self, specs: dict[str, Any]) -> None:
        new = self.index.with_name("new")
        new.write_text(json.dumps({"tasks": specs}))
        new.replace(self.index)

    def ask(self, *requests: dict[str, np.ndarray]) -> list[Response]:
        tensors = [{name: Tensor(name, value) for name, value in sent.items()} for sent in requests]
        return self.model.execute(tensors)


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def column(*values: bytes) -> np.ndarray:
    return np.array([[value] for value in values], dtype=np.object_)


@pytest.fixture
def prepared(load: Load, tmp_path: Path) -> Iterator[Images]:
    found = Images(load, tmp_path)
    yield found
    found.model.finalize()


def photograph(seed: int, height: int = 20, width: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_files_and_raw_images_of_several_requests_are_each_prepared_as_its_task_wants(prepared: Images) -> None:
    pictures = [photograph(i, 20 + i, 30) for i in range(3)]
    found = prepared.ask(
        {"encoded": column(encode(pictures[0]), encode(pictures[1])), "task": column(b"b", b"b")},
        {"images": np.asarray(pictures[2])[None], "task": column(b"a")},
    )
    transforms = {name: eval_transform(from_plain(InputSpec, spec, name)) for name, spec in prepared.specs.items()}
    wanted = np.stack([transforms["b"](picture).numpy() for picture in pictures[:2]])
    np.testing.assert_array_equal(found[0].found["pixel_values"], wanted)
    np.testing.assert_array_equal(found[1].found["pixel_values"], transforms["a"](pictures[2]).numpy()[None])


def test_what_is_wrong_with_one_request_is_not_the_others_fault(prepared: Images) -> None:
    good, raw, whole = column(encode(photograph(0))), np.zeros((1, 9, 9, 3), np.uint8), encode(photograph(1), "JPEG")
    wrong: list[tuple[dict[str, np.ndarray], str]] = [
        ({"encoded": column(whole[: len(whole) // 2]), "task": column(b"a")}, "image 1 of 1: .*[Tt]runcated"),
        ({"encoded": column(whole, b"?"), "task": column(b"a", b"a")}, "image 2 of 2: not an image"),
        ({"encoded": good, "images": raw, "task": column(b"a")}, "either `encoded`"),
        ({"task": column(b"a")}, "either `encoded`"),
        ({"encoded": good, "task": column(b"c")}, "unknown task 'c'; this model has 'a', 'b'"),
        ({"encoded": good, "task": column(b"a", b"b")}, "2 names for 1 images"),
        ({"encoded": column(whole, whole), "task": column(b"a", b"b")}, "2 image sizes"),
    ]
    right = {"encoded": good, "task": column(b"a")}
    found = prepared.ask(right, *(sent for sent, _ in wrong), right)
    for response, (_, said) in zip(found[1:-1], wrong, strict=True):
        assert re.search(said, str(response.error)) and response.error.code == TritonError.INVALID_ARG, response.error
    for response in (found[0], found[-1]):
        assert response.found["pixel_values"].shape == (1, 3, 8, 8)


def test_an_index_is_followed_and_a_broken_one_is_not(prepared: Images) -> None:
    sent = {"encoded": column(encode(photograph(0))), "task": column(b"c")}
    assert "unknown task 'c'" in str(prepared.ask(sent)[0].error)
    prepared.write({**prepared.specs, "c": prepared.specs["a"]})
    assert prepared.ask(sent)[0].error is None
    prepared.index.write_text("{")
    assert prepared.ask(sent)[0].error is None
    prepared.write({"c": prepared.specs["b"]})
    assert prepared.ask(sent)[0].found["pixel_values"].shape == (1, 3, 8, 12)
    assert "unknown task 'a'" in str(prepared.ask({**sent, "task": column(b"a")})[0].error)


def export(packs: dict[str, Path], repo: Path, **options: Any) -> Any:
    sources = tuple(f"{name}={path}" for name, path in packs.items())
    return export_triton(sources, TritonConfig(out=repo, backend="vtk", **options), show=False).models[0]


def further(packed: Any, folder: Path) -> Path:
    """A copy of the pack whose classifier gives the negative."""
    from safetensors.torch import save_file

    folder.mkdir()
    for name in ("task.json", "base_tensors.json"):
        (folder / name).write_bytes((packed.path / name).read_bytes())
    tensors = load_file(packed.path / "task.safetensors")
    save_file({k: -v if k.startswith("head.") else v for k, v in tensors.items()}, folder / "task.safetensors")
    return folder


def test_a_bank_takes_packs_up_and_lets_go_of_them_without_a_restart(
    packed: Any, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "models"
    first = export({"p": packed.path}, repo)
    assert (first.name, first.version, first.updated) == ("p", 1, False)
    config = json.dumps({"parameters": {"dtype": {"string_value": "fp32"}}})
    module = load("bank_model")
    monkeypatch.setattr(sys.modules["vtk_watch"], "POLL_S", 0.05)
    model = module.TritonPythonModel()
    model.initialize(
        {
            "model_repository": str(repo / "p"),
            "model_version": "1",
            "model_config": config,
            "model_instance_kind": "CPU",
        }
    )
    pixels = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        wanted = load_task(packed.path).model(pixels).numpy()

    def ask(*tasks: str) -> Any:
        return model.execute([request(pixels.numpy()[: len(tasks)], list(tasks))])[0]

    def until(*tasks: str, sign: int) -> None:
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            found = ask(*tasks)
            if found.error is None and np.allclose(found.found["logits"][0], sign * wanted[0], atol=1e-4):
                return
            time.sleep(0.02)
        pytest.fail(str(ask(*tasks).error))

    assert np.allclose(ask("p", "p").found["logits"], wanted, atol=1e-4)
    other = further(packed, tmp_path / "other")
    second = export({"p": packed.path, "q": other}, repo, name="p")
    assert (second.version, second.updated) == (1, True)
    until("q", sign=-1)
    export({"p": other, "q": other}, repo, name="p")
    until("p", sign=-1)
    export({"q": other}, repo, name="p")
    limit = time.monotonic() + 30
    while ask("p").error is None and time.monotonic() < limit:
        time.sleep(0.02)
    assert "unknown task 'p'; this model has 'q'" in str(ask("p").error)
    assert list(model.bank.tasks) == [model.watch.keys["q"]]
    model.finalize()
    assert not model.watch.thread.is_alive()


def test_another_config_is_another_version_of_a_bank(packed: Any, tmp_path: Path, capsys: Any) -> None:
    repo = tmp_path / "models"
    argv = ["export", "triton", f"p={packed.path}", "--backend", "vtk", "--out", str(repo)]
    for extra, version, updated in ((), 1, False), (("--instances", "2"), 2, False), (("--instances", "2"), 2, True):
        assert main([*argv, *extra, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["models"][0]
        assert (told["version"], told["updated"], told["tasks"]) == (version, updated, ["p"])
    assert sorted(p.name for p in (repo / "p").iterdir() if p.is_dir()) == ["1", "2"]
    commands = told["commands"]
    assert f"{repo}:/models:ro" in commands[0] and "perf_analyzer -m p" in commands[1] and "client.py" in commands[2]


def test_a_bank_is_of_packs_only(packed: Any, tmp_path: Path, capsys: Any) -> None:
    merged = tmp_path / "whole.safetensors"
    assert main(["tasks", "merge", str(packed.path), "--out", str(merged)]) == 0
    capsys.readouterr()
    argv = ["export", "triton", f"p={merged}", "--backend", "vtk", "--out", str(tmp_path / "models")]
    assert main(argv) == 2
    assert "is not a task pack" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
