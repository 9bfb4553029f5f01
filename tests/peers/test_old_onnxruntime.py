"""``--target ort:X.Y``: an ONNX Runtime of that version opens and runs every kind of file, and not one made without."""

import os
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from vtk.__main__ import main
from vtk.card import Card
from vtk.models.create import build_model
from vtk.packs.load import load_task
from vtk.packs.pack import save_task
from vtk.packs.synthetic import write_synthetic

pytestmark = pytest.mark.peers

RUN = """
import sys
import numpy as np
import onnxruntime
onnxruntime.set_default_logger_severity(4)
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
feeds = dict(np.load(sys.argv[2]))
np.savez(sys.argv[3], **dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds))))
"""
KINDS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp16": ("--dtype", "fp16"),
    "int8 dynamic": ("--int8", "dynamic"),
    "int8 static": ("--int8", "static", "--data", "PHOTOS"),
    "raw images": ("--with-preproc",),
    "both outputs": ("--output", "both", "--softmax"),
}


@pytest.fixture(scope="module")
def old() -> str:
    python = os.environ.get("VTK_OLD_ORT")
    if python is None:
        pytest.fail("VTK_OLD_ORT names no interpreter with an old onnxruntime; run `make test-peers`")
    return python


@pytest.fixture
def pack(weights: Path, tmp_path: Path) -> Path:
    """A pack whose attention and classifier are far from its base's."""
    kwargs = {"depth": 2, "embed_dim": 48, "num_heads": 2}
    created = build_model("vit_tiny_patch16_224", num_classes=3, img_size=32, weights=weights, kwargs=kwargs)
    state = {key: value.clone() for key, value in created.model.state_dict().items()}
    trained = [key for key in state if ".attn." in key or key.startswith("head.")]
    for key in trained:
        state[key] += 0.1 * torch.randn_like(state[key])
    card = Card(created.spec, created.input, ("ant", "bee", "cow"))
    save_task(tmp_path / "pack", state=state, created=created, card=card, trained=trained)
    return tmp_path / "pack"


@pytest.fixture(scope="module")
def target(old: str) -> str:
    """The target that the old interpreter is."""
    code = "import onnxruntime; print('.'.join(onnxruntime.__version__.split('.')[:2]))"
    return f"ort:{subprocess.run([old, '-I', '-c', code], capture_output=True, text=True, check=True).stdout.strip()}"


def run(python: str, path: Path, feeds: dict[str, np.ndarray]) -> subprocess.CompletedProcess[str]:
    np.savez(path.with_name("feeds.npz"), **feeds)
    argv = [python, "-I", "-c", RUN, path, path.with_name("feeds.npz"), path.with_name("found.npz")]
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=300, check=False)


def feeds_of(path: Path) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(0), {}
    types = {"tensor(uint8)": np.uint8, "tensor(float16)": np.float16, "tensor(int32)": np.int32}
    for entry in onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs():
        sides = [side if isinstance(side, int) else 2 if side == "batch" else 48 for side in entry.shape]
        whole = "int" in entry.type
        values = rng.integers(0, 2 if entry.name == "task" else 255, sides) if whole else rng.standard_normal(sides)
        feeds[entry.name] = values.astype(types.get(entry.type, np.float32))
    return feeds


def compare(python: str, path: Path) -> None:
    """Hold the old run time's outputs against the installed one's."""
    feeds = feeds_of(path)
    done = run(python, path, feeds)
    assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = np.load(path.with_name("found.npz"))
    for entry, expected in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        scale = max(np.abs(expected.astype(np.float32)).max(), 1e-3)
        np.testing.assert_allclose(found[entry.name] / scale, expected / scale, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_onnxruntime_runs_what_was_made_for_it(
    old: str, target: str, pack: Path, tmp_path: Path, kind: str
) -> None:
    rng = np.random.default_rng(0)
    for i in range(4):
        (tmp_path / "photos" / "ant").mkdir(parents=True, exist_ok=True)
        photo = Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8))
        photo.save(tmp_path / "photos" / "ant" / f"{i}.png")
    flags = [str(tmp_path / "photos") if word == "PHOTOS" else word for word in KINDS[kind]]
    argv = ["export", "onnx", str(pack), "--out", str(tmp_path / "out"), "--target", target, *flags]
    assert main(argv) == 0
    compare(old, tmp_path / "out" / "model.onnx")


@pytest.mark.parametrize("form", ["files", "gathered"])
def test_an_old_onnxruntime_runs_tasks_that_were_made_for_it(
    old: str, target: str, pack: Path, tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out"
    argv = ["export", "tasks", f"a={pack}", f"b={pack}", "--out", str(out), "--form", form, "--target", target]
    assert main(argv) == 0
    for path in sorted(out.glob("*.onnx")):
        compare(old, path)


def test_an_old_onnxruntime_refuses_what_was_not_made_for_it(old: str, pack: Path, tmp_path: Path) -> None:
    assert main(["export", "onnx", str(pack), "--out", str(tmp_path / "out"), "--opset", "22"]) == 0
    path = tmp_path / "out" / "model.onnx"
    done = run(old, path, feeds_of(path))
    assert done.returncode != 0 and "max supported IR version" in done.stderr


FACTORS = """
import sys
import numpy as np
folder, feeds, out = sys.argv[1:]
sys.path.insert(0, folder)
from vtk_factors import FactorModel
model = FactorModel(folder, threads=1)
model.remove("b")
model.add("b", folder + "/b.safetensors")
np.savez(out, **model.run(dict(np.load(feeds))))
"""


@pytest.mark.parametrize("python", ["VTK_OLD_ORT", "VTK_PEERS"])
def test_the_class_of_a_file_of_factors_runs_in_plain_onnxruntime(
    python: str, target: str, weights: Path, tmp_path: Path
) -> None:
    kwargs = {"depth": 2, "embed_dim": 48, "num_heads": 2}
    packs = []
    for name, classes, rank in (("a", 3, (4, 0)), ("b", 5, (2,))):
        created = build_model("vit_tiny_patch16_224", num_classes=classes, img_size=32, weights=weights, kwargs=kwargs)
        packs.append(str(write_synthetic(tmp_path / name, created, rank=rank, seed=classes)))
    flags = ["--base", str(weights), "--form", "factors", "--target", target, "--out", str(tmp_path / "out")]
    assert main(["export", "tasks", *packs, *flags]) == 0
    pixels = {n: np.random.default_rng(i).standard_normal((2, 3, 32, 32), np.float32) for i, n in enumerate("ab")}
    np.savez(tmp_path / "feeds.npz", **pixels)
    argv = [os.environ[python], "-I", "-c", FACTORS, tmp_path / "out", tmp_path / "feeds.npz", tmp_path / "found.npz"]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(np.load(tmp_path / "found.npz"))
    for name, images in pixels.items():
        with torch.no_grad():
            expected = load_task(tmp_path / name, base=weights).model(torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(found[name], expected, atol=2e-4 * np.abs(expected).max())
