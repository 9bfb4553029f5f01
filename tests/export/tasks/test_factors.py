"""The form ``factors``: one graph whose stacks are inputs, a file of factors a task, and the class that serves them."""

import ast
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from vtk.__main__ import main
from vtk.models.create import build_model
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.packs.synthetic import write_synthetic
from vtk_export.tasks import factor_build
from vtk_export.tasks.config import TasksConfig
from vtk_export.tasks.export import export_tasks
from vtk_export.tasks.readme import factors_page

NAME, KWARGS = "vit_tiny_patch16_224", {"depth": 1, "embed_dim": 32, "num_heads": 2}
TASKS = {"pets": (3, (4, 0, 2), "fp32"), "cars": (5, (0,), "bf16"), "dogs": (2, (3,), "int8")}
"""Classes, ranks of the matrices in turn, and type of the factors in the pack."""


CALLS = 60
"""Of each thread, while tasks come and go."""


class Hall:
    """A base, packs of factors on it, and an export of them."""

    def __init__(self, root: Path) -> None:
        self.root, self.base = root, root / "base.safetensors"
        torch.manual_seed(0)
        save_file(timm.create_model(NAME, img_size=32, num_classes=0, **KWARGS).state_dict(), self.base)

    def pack(self, name: str, classes: int, ranks: tuple[int, ...], dtype: str, seed: int = 0) -> Path:
        created = build_model(NAME, num_classes=classes, img_size=32, weights=self.base, kwargs=KWARGS)
        return write_synthetic(self.root / name / "task", created, rank=ranks, dtype=dtype, seed=seed + classes)

    def logits(self, name: str, images: np.ndarray) -> np.ndarray:
        """What the pack's and the base's files say, in fp64 by the formula."""
        folder = self.root / name / "task"
        card, stored = json.loads((folder / "task.json").read_text()), load_file(folder / "task.safetensors")
        state = {k: v.double() for k, v in load_file(self.base).items()}
        for key, fact in card["pack"]["factors"].items():
            if fact["rank"]:
                a, b = (stored.pop(f"{key}:{part}").double() for part in "ab")
                if f"{key}:a:scale" in stored:
                    a *= stored.pop(f"{key}:a:scale").double()[:, None]
                    b *= stored.pop(f"{key}:b:scale").double()
                state[key] = state[key] + fact["scale"] * (b @ a).view(state[key].shape)
        state |= {k: v.double() for k, v in stored.items()}
        model = timm.create_model(NAME, num_classes=len(card["classes"]), img_size=32, **KWARGS).double().eval()
        model.load_state_dict(state, strict=True)
        with torch.no_grad():
            return model(torch.from_numpy(images).double()).numpy()


@pytest.fixture(scope="module")
def hall(tmp_path_factory: pytest.TempPathFactory) -> Hall:
    found = Hall(tmp_path_factory.mktemp("hall"))
    for name, (classes, ranks, dtype) in TASKS.items():
        found.pack(name, classes, ranks, dtype)
    return found


@pytest.fixture(scope="module")
def done(hall: Hall, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    packs = [hall.root / name for name in TASKS]
    return tools.run_export(*packs, "--form", "factors", "--out", tmp_path_factory.mktemp("factors") / "out")


@pytest.fixture(scope="module")
def served(done: Any) -> Any:
    """The module that lies in the folder."""
    spec = importlib.util.spec_from_file_location("vtk_factors", done.out / "vtk_factors.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["vtk_factors"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(served: Any, done: Any) -> Any:
    return served.FactorModel(done.out, threads=1)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 32, 32), np.float32)


def close(found: np.ndarray, expected: np.ndarray, bound: float = 2e-4) -> None:
    """fp16 factors: their rounding is in the bound."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


def altered(source: Path, target: Path, change: Any) -> Path:
    """Write a task's file with other tensors, whole by its own digest."""
    tensors = load_file(source)
    about = _about(source)
    change(tensors, about)
    save_file({k: v.contiguous() for k, v in tensors.items()}, target)
    data = target.read_bytes()
    about["sha256"] = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    save_file({k: v.contiguous() for k, v in tensors.items()}, target, {"vtk.factors": json.dumps(about)})
    return target


def _about(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["vtk.factors"])


def test_each_task_has_the_logits_of_its_own_model_in_calls_of_all(model: Any, hall: Hall) -> None:
    batches = {
        name: images(count, seed) for seed, (name, count) in enumerate({"cars": 2, "pets": 3, "dogs": 1}.items())
    }
    for names in (("cars", "pets", "dogs"), ("dogs",), ("pets", "cars")):
        found = model.run({name: batches[name] for name in names})
        assert list(found) == list(names)
        for name in names:
            close(found[name], hall.logits(name, batches[name]))
    assert model.run({"pets": images(0)})["pets"].shape == (0, 3)
    assert model.run({}) == {}


@pytest.mark.slow
def test_a_graph_of_factors_has_the_names_that_were_given_and_another_graph_is_not_taken_for_it(
    hall: Hall, done: Any, served: Any, tools: Any, tmp_path: Path
) -> None:
    words = ["--form", "factors", "--input-name", "x", "--output-name", "scores", "--input-name", "task=slot"]
    packs = [hall.root / name for name in TASKS]
    named = tools.run_export(*packs, *words, "--out", tmp_path / "out")
    graph = onnx.load(named.out / "factors.onnx").graph
    assert [v.name for v in graph.input][:2] == ["x", "slot"]
    assert [v.name for v in graph.output] == ["scores", "num_classes"]
    found = served.FactorModel(named.out, threads=1).run({"pets": images(2, 7)})["pets"]
    close(found, hall.logits("pets", images(2, 7)))
    plain = TasksConfig(out=tmp_path / "plain", form="factors")
    export_tasks(packs, plain, earlier=named.out, show=False)
    assert [v.name for v in onnx.load(tmp_path / "plain" / "factors.onnx").graph.input][:2] == ["pixel_values", "task"]
    assert "names" not in json.loads((tmp_path / "plain" / "factors.json").read_text("utf-8"))


def test_the_folder_tells_stacks_ranks_classes_and_padding(done: Any, model: Any) -> None:
    layout = json.loads((done.out / "factors.json").read_text("utf-8"))
    proto = onnx.load(done.out / "factors.onnx")
    dims = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    assert {s["name"]: ["tasks", *s["axes"]] for s in layout["stacks"]} == dict(list(dims.items())[2:])
    assert dims["task"] == ["batch"]
    assert [d.dim_param for d in proto.graph.output[0].type.tensor_type.shape.dim] == ["batch", "classes"]
    ranks = {name: task["ranks"] for name, task in layout["tasks"].items()}
    assert set(ranks["cars"].values()) == {0}
    assert sorted(set(ranks["pets"].values())) == [0, 2, 4]
    assert layout["sizes"]["classes"] == 5
    assert layout["sizes"]["rank_pos_embed"] == max(found["pos_embed"] for found in ranks.values())
    assert done.result["padded_bytes"] == layout["padded_bytes"] == model.memory()["padding"] > 0
    assert model.memory()["stacks"] == model.memory()["tasks"] + model.memory()["padding"]
    assert done.index["files"] == sorted(p.name for p in done.out.iterdir() if p.is_file() and p.name != "tasks.json")
    assert all(row["passed"] for row in done.result["verified"])
    assert {(row["task"], row["against"]) for row in done.result["verified"]} == {
        (name, against) for name in TASKS for against in ("stored", "torch", "bank")
    }


def test_a_task_that_was_removed_leaves_nan_and_nothing_else(model: Any, served: Any, done: Any) -> None:
    before = model.run({name: images(2) for name in TASKS})
    slot = model.tasks["cars"].slot
    model.remove("cars")
    logits, counts = model.run_slots(images(1), np.array([slot], np.int32))
    assert np.isnan(logits).all()
    assert counts.tolist() == [0]
    with pytest.raises(served.FactorError, match=r"unknown task 'cars'; this model has 'pets', 'dogs'"):
        model.run({"cars": images(1), "pets": images(1)})
    np.testing.assert_array_equal(model.run({"dogs": images(2)})["dogs"], before["dogs"])
    model.add("limousines", done.out / "cars.safetensors")
    assert model.tasks["limousines"].slot == slot
    np.testing.assert_allclose(model.run({"limousines": images(2)})["limousines"], before["cars"], atol=1e-6)


@pytest.mark.parametrize("number", [-1, -3, 3, 2**31 - 1, -(2**31)])
def test_a_number_that_no_task_has_gives_nan_and_spoils_no_other_row(model: Any, number: int) -> None:
    pixels = images(3)
    logits, counts = model.run_slots(pixels, np.array([1, number, 0], np.int32))
    alone, _ = model.run_slots(pixels, np.array([1, 0, 0], np.int32))
    assert counts.tolist() == [5, 0, 3]
    assert np.isnan(logits[1]).all()
    np.testing.assert_allclose(logits[[0, 2]], alone[[0, 2]], atol=1e-6)


def test_stacks_grow_for_more_tasks_larger_ranks_and_more_classes(served: Any, done: Any, tmp_path: Path) -> None:
    model = served.FactorModel(done.out, threads=1, tasks=["pets"])
    before = model.run({"pets": images(2)})["pets"]

    def larger(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        about["classes"] = [f"c{i}" for i in range(9)]
        tensors["head.weight"], tensors["head.bias"] = torch.ones(32, 9), torch.arange(9.0)
        for name in [name for name in tensors if name.endswith((".a", ".b"))]:
            width = {**dict.fromkeys(("pos_embed.a", "blocks.0.attn.qkv.b", "blocks.0.attn.proj.b"), 0)}.get(name, 1)
            shape = list(tensors[name].shape)
            shape[width] = 11
            tensors[name] = torch.zeros(shape, dtype=torch.float16)

    file = altered(done.out / "pets.safetensors", tmp_path / "large.safetensors", larger)
    model.add("large", file)
    for i in range(6):
        model.add(f"more {i}", done.out / "dogs.safetensors")
    found = model.run({"large": images(1), "pets": images(2), "more 5": images(1)})
    assert found["large"].shape == (1, 9)
    assert np.diff(found["large"][0]) == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(found["pets"], before, atol=1e-6)
    assert model.memory()["stacks"] >= model.memory()["tasks"] + model.memory()["padding"]


def damages() -> dict[str, tuple[Any, str]]:
    def wrong(name: str, value: Any) -> Any:
        return lambda tensors, about: tensors.update({name: value(tensors[name])})

    return {
        "another export": (lambda t, about: about.update(layout="0" * 16), "of another export"),
        "NaN": (wrong("head.weight", lambda t: t * float("nan")), "`head.weight` holds numbers that are not finite"),
        "absent": (lambda t, about: t.pop("head.bias"), "it has no 'head.bias'"),
        "shape": (wrong("blocks.0.attn.proj.bias", lambda t: t[:-1]), r"proj.bias` is \(31,\), expected \(32,\)"),
        "type": (wrong("blocks.0.attn.qkv.a", lambda t: t.float()), "`blocks.0.attn.qkv.a` is F32"),
        "rank": (
            wrong("blocks.0.attn.qkv.a", lambda t: torch.zeros(32, 9).half()),
            "the other factor of its matrix has 9",
        ),
        "classes": (lambda t, about: about.update(classes=["one"]), "`head.weight` is .* expected"),
    }


def test_files_that_do_not_fit_are_refused_in_one_line_and_change_nothing(
    model: Any, served: Any, done: Any, tmp_path: Path
) -> None:
    source, before = done.out / "pets.safetensors", model.run({"pets": images(1)})["pets"]
    data = source.read_bytes()
    cut = {
        "empty": b"", "cut": data[:-1], "header": data[:40], "longer": data + b"0", "text": b"no" * 40,
        "flipped": data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], "huge header": b"\xff" * 8 + data[8:],
    }  # fmt: skip
    for name, content in cut.items():
        (tmp_path / name).write_bytes(content)
    told = dict.fromkeys(cut, "is no file of a task of this model")
    for name, (change, text) in damages().items():
        altered(source, tmp_path / name, change)
        told[name] = text
    for name, text in {**told, "nowhere": "cannot be read"}.items():
        for change in (model.replace, model.add):
            with pytest.raises(served.FactorError, match=text) as caught:
                change("pets", tmp_path / name)
            assert "\n" not in str(caught.value), name
    with pytest.raises(served.FactorError, match="there is a task 'pets' already"):
        model.add("pets", source)
    for change in (model.remove, lambda name: model.replace(name, source)):
        with pytest.raises(served.FactorError, match="unknown task 'cats'"):
            change("cats")
    with pytest.raises(served.FactorError, match=r"takes a mapping, .*; given a ndarray"):
        model.run(images(1, 0))
    whole = images(2, 0)
    right = model.run({"pets": whole})["pets"]
    for dtype in (">f4", "f8", ">f8"):
        assert np.array_equal(model.run({"pets": whole.astype(dtype)})["pets"], right)
    for dtype in ("u1", "i8", "c8", "O", "U4"):
        with pytest.raises(served.FactorError, match="they have to be of a floating type"):
            model.run({"pets": whole.astype(dtype)})
    with pytest.raises(served.FactorError, match=r"they have to be \(n, 3, 32, 32\)"):
        model.run({"pets": whole[0]})
    with pytest.raises(served.FactorError, match="images of task 'pets' are"):
        model.run({"pets": images(1)[:, :, :16]})
    np.testing.assert_array_equal(model.run({"pets": images(1)})["pets"], before)


def test_a_folder_whose_graph_is_damaged_does_not_open(served: Any, done: Any, tmp_path: Path) -> None:
    shutil.copytree(done.out, tmp_path / "out")
    graph = tmp_path / "out" / "factors.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(served.FactorError, match="is damaged"):
        served.FactorModel(tmp_path / "out")
    (tmp_path / "out" / "factors.json").write_text("{}")
    with pytest.raises(served.FactorError, match="is no layout of"):
        served.FactorModel(tmp_path / "out")


def test_no_row_is_wrong_while_tasks_come_and_go(model: Any, served: Any, done: Any) -> None:
    """Every version of a task answers as that version does alone, whatever other threads do."""
    pixels = [images(2, seed) for seed in range(3)]
    right = [{name: model.run({name: some})[name] for name in TASKS} for some in pixels]
    wrong: list[str] = []

    def call(which: int) -> None:
        some, expected = pixels[which], right[which]
        for _ in range(CALLS):
            try:
                found = model.run({"pets": some, "guest": some})
            except served.FactorError:
                found = model.run({"pets": some})
            if not np.allclose(found["pets"], expected["pets"], atol=1e-5):
                wrong.append("pets")
            guest = found.get("guest", expected["cars"])
            if not any(
                guest.shape == expected[n].shape and np.allclose(guest, expected[n], atol=1e-5)
                for n in ("cars", "dogs")
            ):
                wrong.append("guest")

    threads = [threading.Thread(target=call, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for i in range(20 * CALLS):
        if not any(thread.is_alive() for thread in threads):
            break
        model.add("guest", done.out / ("cars.safetensors" if i % 2 else "dogs.safetensors"))
        model.replace("guest", done.out / ("dogs.safetensors" if i % 2 else "cars.safetensors"))
        model.remove("guest")
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_the_class_needs_numpy_and_onnxruntime_alone(done: Any) -> None:
    tree = ast.parse((done.out / "vtk_factors.py").read_text("utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names - sys.stdlib_module_names - {"collections.abc"} == {"numpy", "onnxruntime"}


def test_another_export_of_the_base_has_the_same_graph_so_tasks_fit_both(
    hall: Hall, done: Any, served: Any, tools: Any, tmp_path: Path
) -> None:
    hall.pack("birds", 4, (6,), "bf16")
    shutil.copytree(done.out, tmp_path / "out")
    (tmp_path / "out" / "__pycache__").mkdir(exist_ok=True)
    (tmp_path / "out" / "__pycache__" / "vtk_factors.cpython-399.pyc").write_bytes(b"what an import leaves")
    other = tools.run_export(hall.root / "birds", "--form", "factors", "--out", tmp_path / "out")
    assert {path.name for path in other.out.glob("*.safetensors")} == {"birds.safetensors"}
    assert (other.out / "factors.onnx").read_bytes() == (done.out / "factors.onnx").read_bytes()
    model = served.FactorModel(done.out, threads=1)
    model.add("birds", other.out / "birds.safetensors")
    close(model.run({"birds": images(2)})["birds"], hall.logits("birds", images(2)))


def test_dense_packs_are_refused_by_a_line_that_names_compress(
    packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["export", "tasks", str(packs["pets"]), "--form", "factors", "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "`pets`" in error
    assert "dense pack" in error
    assert "vtk tasks compress" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--target", "trt:10.9"), "`--form factors` is for ONNX Runtime"),
        (("--profile", "1"), "leave it out of --form factors"),
        (("--fuse",), "`--fuse` is for --form files"),
    ],
    ids=["tensorrt", "profile", "fuse"],
)
def test_options_that_do_not_go_with_factors(
    hall: Hall, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    argv = ["export", "tasks", str(hall.root / "pets"), "--form", "factors", "--out", str(tmp_path / "out"), *flags]
    assert main(argv) == 2
    assert told in capsys.readouterr().err


FAULTS = {
    "rows": "task `pets` against stored: batch 1: max error",
    "padding": "gives logits",
    "removal": "answers for `pets` after it was removed",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_files_are_exit_4_and_not_kept(
    hall: Hall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    write, code = factor_build.write_rows, factor_build._CODE.read_text("utf-8")

    def wrong(path: Path, layout: Any, rows: Any, classes: Any) -> str:
        rows = dict(rows)
        if fault == "rows":
            rows["blocks.0.attn.proj.b"] = -rows["blocks.0.attn.proj.b"]
        elif fault == "padding":
            for name in ("head.bias", "head.weight"):
                rows[name] = torch.nn.functional.pad(rows[name], (0, 1))
            classes = [*classes, "one more"]
        return write(path, layout, rows, classes)

    monkeypatch.setattr(factor_build, "write_rows", wrong)
    if fault == "removal":
        (tmp_path / "code.py").write_text(code.replace("stack.write(slot, None)", "pass"), encoding="utf-8")
        monkeypatch.setattr(factor_build, "_CODE", tmp_path / "code.py")
    argv = ["export", "tasks", str(hall.root / "pets"), "--form", "factors", "--out", str(tmp_path / "out")]
    assert main(argv) == 4
    assert FAULTS[fault] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


PAGE = """
import os, re, sys, json
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vtk", "vtk_kernels", "vtk_export", "torch"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
folder, image = sys.argv[1:]
os.chdir(folder)
sys.path.insert(0, folder)
scope = {}
exec(re.search(r"```python\\n(.*?)```", open("README.md", encoding="utf-8").read(), re.DOTALL)[1], scope)
scope["exchange"]("new", "pets.safetensors")  # comes
scope["exchange"]("cars", "dogs.safetensors")  # has other classes than before
print(json.dumps([scope["classify"](image, task) for task in ("pets", "dogs", "new", "cars")]))
"""


@pytest.mark.slow
def test_the_page_runs_in_an_interpreter_without_vtk_and_torch(
    done: Any, hall: Hall, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = next(photos.rglob("*.png"))
    argv = [sys.executable, "-I", "-c", PAGE, str(done.out), str(image)]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [dict(pairs) for pairs in json.loads(run.stdout)]
    assert found[0] == found[2] and found[1] == found[3]
    for name, shares in zip(("pets", "dogs"), found, strict=False):
        task = load_task(hall.root / name / "task", base=hall.base)
        (right,) = task.predict(image, top_k=5)
        assert max(shares, key=shares.__getitem__) == right.labels[0]
        assert max(shares.values()) == pytest.approx(right.scores[0], abs=1e-3)


def test_on_the_page_a_task_that_comes_is_treated_as_one_that_is_named_where_tasks_differ(
    hall: Hall, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = read_card(hall.root / "pets" / "task")
    cards = {"one": card, "many": replace(card, multi_label=True)}
    listed = {name: {"multi_label": card.multi_label} for name, card in cards.items()}
    (tmp_path / "factors.json").write_text(json.dumps({"tasks": listed}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    logits = np.array([[0.0, 1.0, -1.0]], np.float32)

    class Model:  # logits that do not depend on weights
        def __init__(self, folder: str) -> None:
            self.tasks = {name: types.SimpleNamespace(classes="xyz") for name in cards}

        def add(self, name: str, file: str) -> None:
            self.tasks[name] = types.SimpleNamespace(classes=file)

        replace = add

        def run(self, batches: dict[str, Any]) -> dict[str, np.ndarray]:
            return dict.fromkeys(batches, logits)

    monkeypatch.setitem(sys.modules, "vtk_factors", types.SimpleNamespace(FactorModel=Model))
    scope: dict[str, Any] = {}
    exec(factors_page(cards, batch=None).split("```python\n")[1].split("```")[0], scope)
    for task, like in (("new", "many"), ("many", "one")):
        scope["exchange"](task, "uvw", like)
    image = next(photos.rglob("*.png"))
    sigmoid, softmax = 1 / (1 + np.exp(-logits[0])), np.exp(logits[0]) / np.exp(logits[0]).sum()
    for task, shares in (("new", sigmoid), ("many", softmax)):
        assert dict(scope["classify"](image, task)) == pytest.approx(dict(zip("uvw", shares, strict=True)))
    with pytest.raises(TypeError, match="like"):
        scope["exchange"]("other", "uvw")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--static-batch", "2", "--opset", "20"), ("--target", "ort:1.16", "--factor-dtype", "fp32")],
    ids=["static-opset-20", "old-runtime-fp32"],
)
def test_other_forms_of_the_graph(hall: Hall, tools: Any, served: Any, tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = tools.run_export(*(hall.root / name for name in TASKS), "--form", "factors", *flags, "--out", tmp_path / "o")
    model = served.FactorModel(done.out, threads=1)
    proto = onnx.load(done.out / "factors.onnx")
    batch = proto.graph.input[0].type.tensor_type.shape.dim[0]
    assert (batch.dim_value, proto.opset_import[0].version) == ((2, 20) if "--static-batch" in flags else (0, 18))
    exact = "fp32" in flags
    for count in (0, 1, 2, 3):
        found = model.run({name: images(count, 3) for name in TASKS})
        for name in TASKS:
            assert len(found[name]) == count
            if count:
                close(found[name], hall.logits(name, images(count, 3)), 1e-5 if exact else 2e-4)


BACKBONES = {
    "dinov3": ("vit_small_patch16_dinov3", {"depth": 2, "embed_dim": 32, "num_heads": 2}, 32),
    "eva02": ("eva02_tiny_patch14_224", {"depth": 2, "embed_dim": 32, "num_heads": 2}, 28),
    "registers": (NAME, {**KWARGS, "reg_tokens": 2, "init_values": 0.1, "no_embed_class": True}, 32),
    "mean": (NAME, {**KWARGS, "global_pool": "avg", "class_token": False, "qk_norm": True}, 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BACKBONES)
def test_other_backbones(kind: str, tools: Any, served: Any, tmp_path: Path) -> None:
    name, kwargs, size = BACKBONES[kind]
    torch.manual_seed(1)
    save_file(timm.create_model(name, img_size=size, num_classes=0, **kwargs).state_dict(), tmp_path / "b.safetensors")
    packs = []
    for i, (ranks, classes) in enumerate((((3, 0), 2), ((5,), 4))):
        created = build_model(
            name, num_classes=classes, img_size=size, weights=tmp_path / "b.safetensors", kwargs=kwargs
        )  # fmt: skip
        packs.append(f"t{i}={write_synthetic(tmp_path / f't{i}', created, rank=ranks, seed=i)}")
    done = tools.run_export(
        *packs, "--form", "factors", "--base", tmp_path / "b.safetensors", "--out", tmp_path / "out"
    )
    model = served.FactorModel(done.out, threads=1)
    pixels = np.random.default_rng(0).standard_normal((2, 3, size, size), np.float32)
    found = model.run({"t0": pixels, "t1": pixels})
    for task in found:
        with torch.no_grad():
            expected = load_task(tmp_path / task, base=tmp_path / "b.safetensors").model(torch.from_numpy(pixels))
        close(found[task], expected.numpy())


def test_tasks_of_several_image_sizes_are_refused_by_name(
    hall: Hall, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    created = build_model(NAME, num_classes=2, img_size=(32, 48), weights=hall.base, kwargs=KWARGS)
    wide = write_synthetic(tmp_path / "wide", created, rank=2)
    argv = ["export", "tasks", str(hall.root / "pets"), str(wide), "--form", "factors", "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "`pets`" in error and "`wide`" in error and "3×32×32 and 3×32×48" in error and "--form files" in error
