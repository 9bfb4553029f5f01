"""Every artefact, loaded as its page says in an interpreter without vtk, answers as vtk does."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.__main__ import main
from vtk.card import Card
from vtk.data.loading.eval_pipeline import eval_transform, read_input
from vtk.packs.checkpoint_readme import page_beside
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx
from vtk_export.readme import onnx_page
from vtk_export.tasks.readme import tasks_page

ALONE = Path(__file__).with_name("_alone.py")
Cases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A turned JPEG, and a PNG with opacity."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(3)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(rng.integers(0, 256, (61, 45, 3), np.uint8)).save(folder / "a.jpg", exif=exif)
    Image.fromarray(rng.integers(0, 256, (40, 77, 4), np.uint8)).save(folder / "b.png")
    return [str(folder / "a.jpg"), str(folder / "b.png")]


def case(folder: Path, images: list[str], page: str = "README.md", **more: Any) -> dict[str, Any]:
    return {"page": str(folder / page), "folder": str(folder), "images": images, **more}


def follow(cases: Cases, tmp_path: Path) -> dict[str, Any]:
    """Follow the pages in one new interpreter."""
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    argv = [sys.executable, "-I", str(ALONE), str(tmp_path / "cases.json"), str(tmp_path / "answers.json")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((tmp_path / "answers.json").read_text())
    return found


def expected(model: torch.nn.Module, card: Card, images: list[str]) -> np.ndarray:
    """What the toolkit makes of image files: probabilities by class, (images, classes)."""
    transform = eval_transform(card.input)
    with torch.no_grad():
        logits = model(torch.stack([read_input(path, transform, 10**8) for path in images])).double()
    return (logits.sigmoid() if card.multi_label else logits.softmax(1)).numpy()


def check(found: list[Any], want: np.ndarray, classes: tuple[str, ...], atol: float = 1e-4) -> None:
    for row, right in zip(found, want, strict=False):
        shares = dict(row)
        assert list(shares) == [classes[i] for i in np.argsort(-right, kind="stable")]
        np.testing.assert_allclose([shares[name] for name in classes], right, atol=atol)


def run(*argv: object) -> None:
    assert main([str(word) for word in argv]) == 0


def test_pages_load_their_artefacts_without_vtk(
    packed: Any, exported: Any, fake_exporter: Any, images: list[str], tmp_path: Path
) -> None:
    fake_exporter()
    run("tasks", "merge", packed.path, "--out", tmp_path / "pets.v1.safetensors")
    run("tasks", "bundle", packed.path, "--out", tmp_path / "bundle")
    run("export", "triton", packed.path, "--name", "pets", "--out", tmp_path / "models", "--no-fuse")
    found = follow({
        "merged": case(tmp_path, images, page_beside(tmp_path / "pets.v1.safetensors").name),
        "bundle": case(tmp_path / "bundle", images),
        "onnx": case(exported.out, images, inputs=True),
        "triton": case(tmp_path / "models" / "pets", images),
    }, tmp_path)  # fmt: skip
    want = expected(packed.model(), packed.card, images)
    for answers in found.values():
        check(answers[:2], want, packed.card.classes)
    layouts, answered, none = found["onnx"][2:]
    for name, values in layouts.items():
        assert values == layouts["contiguous"], name
    assert answered == [] and none == [0, 5]


@pytest.mark.slow
def test_pages_of_other_forms_load_without_vtk(calm: Any, images: list[str], tmp_path: Path) -> None:
    forms = {
        "fp16": ("--dtype", "fp16"), "fp16 io": ("--dtype", "fp16", "--keep-io-types"), "int8": ("--int8", "dynamic"),
        "preproc": ("--with-preproc", "--softmax"), "preproc fp16": ("--with-preproc", "--dtype", "fp16"),
        "three": ("--static-batch", "3"), "both": ("--output", "both"),
    }  # fmt: skip
    for name, flags in forms.items():
        run("export", "onnx", calm.path, "--out", tmp_path / name, *flags)
    run("tasks", "to-peft", calm.path, "--out", tmp_path / "adapter")
    run("export", "tensorrt", calm.path, "--out", tmp_path / "trt")
    run("export", "tasks", f"one={calm.path}", f"two={calm.path}", "--form", "both", "--out", tmp_path / "tasks")
    run("export", "triton", calm.path, "--name", "raw", "--with-preproc", "--softmax", "--out", tmp_path / "models")
    run("export", "triton", calm.path, "--name", "two", "--static-batch", 2, "--out", tmp_path / "models")
    cases = {name: case(tmp_path / name, images) for name in (*forms, "adapter", "trt")}
    cases["tasks"] = case(tmp_path / "tasks", images, more=["two"])
    cases |= {name: case(tmp_path / "models" / name, images) for name in ("raw", "two")}
    found = follow(cases, tmp_path)
    want = expected(calm.model(), calm.card, images)
    for name, answers in found.items():
        check(answers, want, calm.card.classes, 0.05 if name == "int8" else 0.01 if "16" in name else 1e-3)


def test_a_page_tells_several_labels_and_all_classes(packed: Any, exported: Any) -> None:
    card = dataclasses.replace(packed.card, multi_label=True)
    page = onnx_page(card, names=("logits",), precision="fp32", half_io=False)
    assert "sigmoid" in page and "1 / (1 + np.exp(-values))" in page
    text = (exported.out / "README.md").read_text("utf-8")
    assert '4 "é"' in text and "pixel_values" in text and "(batch, 3, 32, 48)" in text
    bf16 = onnx_page(card, names=("logits",), precision="bf16", half_io=True, verified=False)
    assert "ortvalue_from_numpy_with_onnx_type" in bf16 and "not verified" in bf16


def test_a_page_of_tasks_tells_each_size_and_kind_of_label(packed: Any) -> None:
    spec = dataclasses.replace(packed.card.input, height=64, width=64)
    large = dataclasses.replace(packed.card, input=spec, multi_label=True)
    same = tasks_page({"a": packed.card, "b": packed.card}, files=True, gathered=False, options={}, batch=None)
    assert "(batch, 3, 32, 48)" in same and "softmax" in same and "if task in" not in same
    page = tasks_page({"a": packed.card, "b": large}, files=True, gathered=False, options={}, batch=None)
    assert "(batch, 3, height, width)" in page and "(batch, 3, 32, 48)" not in page.partition("```")[0]
    assert "if task in ['b'] else" in page


def test_a_page_of_dynamic_int8_says_one_image_a_call(packed: Any) -> None:
    pages = [
        onnx_page(packed.card, names=("logits",), precision="fp32", half_io=False, int8=kind)
        for kind in ("static", "dynamic")
    ]
    assert ["Run one image per call" in page for page in pages] == [False, True]
    assert all('`classify("photo.jpg")` returns' in page for page in pages)


def test_a_page_of_somebody_is_not_replaced(
    packed: Any, fake_exporter: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_exporter()
    (tmp_path / "README.md").write_text("# My models\n")
    (tmp_path / "m.README.md").write_text("# My notes\n")
    for argv in (
        ("export", "onnx", packed.path, "--out", tmp_path, "--overwrite", "--no-fuse"),
        ("tasks", "merge", packed.path, "--out", tmp_path / "m.safetensors"),
    ):
        assert main([str(word) for word in argv]) == 3
        assert "README.md" in capsys.readouterr().err
    run("export", "triton", packed.path, "--name", "a", "--out", tmp_path / "models", "--no-fuse")
    page = tmp_path / "models" / "a" / "README.md"
    page.write_text("# Mine\n")
    assert main(["export", "triton", str(packed.path), "--name", "a", "--out", str(tmp_path / "models")]) == 3
    assert "README.md" in capsys.readouterr().err and page.read_text() == "# Mine\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "m.README.md", "models"]


def test_exports_say_what_they_do(
    packed: Any, fake_exporter: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_exporter()
    argv = ("export", "onnx", packed.path, "--out", tmp_path / "out", "--no-fuse")
    run(*argv)
    stages = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" …")]
    assert [line.split()[0] for line in stages] == ["loading", "converting", "comparing"]
    run(*argv, "--json")
    said = capsys.readouterr()
    assert json.loads(said.out) and "…" not in said.err
    export_onnx(str(packed.path), OnnxConfig(out=tmp_path / "out", fuse=False), show=False)
    assert "…" not in capsys.readouterr().out
