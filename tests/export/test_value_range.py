"""The value range and profiles after an export: nodes of a graph, served code and the client, without vtk."""

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from tests.export.conftest import TIMM
from tests.export.graph.test_preproc import identity
from tests.vtk.data._images import ADOBE_RGB, matrix_profile, tiff
from vtk.__main__ import main
from vtk.card import Card, InputSpec
from vtk.data.decoding.memory_images import take_image
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.models.create import build_model
from vtk.packs.base_files import store_base
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.packs.pack import save_task
from vtk_export.graph.preproc import prepend
from vtk_export.triton.ensemble_config import raw_slot
from vtk_export.triton.files import decoding_code
from vtk_export.triton.served import vtk_images

RNG = np.random.default_rng(0)
TWELVE: dict[str, Any] = {"decoding": "srgb", "value_range": ((0.0, 4095.0),), "value_type": "uint16"}


def levels(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The formula of docs/guides/data.md, in NumPy."""
    values = np.where(np.isnan(values.astype(np.float64)), low, values.astype(np.float64))
    return np.clip(np.rint((values - low) * (255 / (high - low))), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("uint16", 0, 4095), ("uint16", 200, 2600), ("int16", -1024, 3071), ("int32", -9, 1e6), ("float32", -0.5, 1.5),
     ("uint16", 0, 65535)],
)  # fmt: skip
def test_nodes_map_values_once_to_eight_bits(kind: str, low: float, high: float) -> None:
    spec = InputSpec(24, 24, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), decoding="srgb",
                     value_range=((float(low), float(high)),), value_type=kind)  # fmt: skip
    proto = identity(spec)
    prepend(proto, spec)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == {"float32": "tensor(float)"}.get(kind, f"tensor({kind})")
    plain = eval_transform(InputSpec(24, 24, mean=spec.mean, std=spec.std))
    span = high - low
    for side in (24, 31):
        values = low - 0.1 * span + 1.2 * span * RNG.random((side, 24, 3))
        if kind == "float32":
            values[0, :3, 0] = np.nan, np.inf, -np.inf
        else:
            limits = np.iinfo(kind)
            values = np.clip(values, limits.min, limits.max)
        raw = values.astype(kind)
        (found,) = session.run(None, {"images": raw[None]})[0]
        want = plain(Image.fromarray(levels(raw, low, high))).numpy()
        apart = np.abs(found - want) * np.array(spec.std).reshape(3, 1, 1) * 255
        assert apart.max() < (1e-3 if side == 24 else 1.01)
        assert np.array_equal(eval_transform(spec)(take_image(raw, 3, Decoding.of(spec))).numpy(), want)


def write_pack(root: Path, in_chans: int = 3, **changes: Any) -> Path:
    torch.manual_seed(2)
    created = build_model("vit_tiny_patch16_224", num_classes=2, img_size=32, in_chans=in_chans, pretrained=False,
                          kwargs=TIMM)  # fmt: skip
    state = {k: v.clone() for k, v in created.model.state_dict().items()}
    trained = [k for k in state if ".attn." in k or k.startswith("head.")]
    spec = dataclasses.replace(created.input, **changes)
    created = dataclasses.replace(created, input=spec)
    store_base(created.base)
    card = Card(created.spec, spec, ("dim", "light"), transforms=created.transforms)
    save_task(root / "task", state=state, created=created, card=card, trained=trained)
    return root / "task"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a model of 12 bits, and photographs beside it."""
    root = tmp_path_factory.mktemp("deep")
    (root / "photos").mkdir()
    for i in range(3):
        values = RNG.integers(0, 4096, (30 + i, 40)).astype(np.uint16)
        Image.fromarray(values).save(root / "photos" / f"{i}.png")
    tiff(root / "photos" / "rgb.tif", RNG.integers(0, 4096, (20, 50, 3)).astype(np.uint16), photometric=2)
    eight = RNG.integers(40, 216, (44, 33, 3), dtype=np.uint8)
    Image.fromarray(eight).save(root / "photos" / "eight.png")
    Image.fromarray(eight).save(root / "photos" / "wide.png", icc_profile=matrix_profile("Adobe", ADOBE_RGB, 2.2))
    return root


def test_a_graph_takes_sixteen_bits_and_tells_its_range(
    deep: Path, tmp_path: Path, vtk_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = write_pack(tmp_path, **TWELVE)
    argv = ["export", "onnx", str(pack), "--with-preproc", "--out", str(tmp_path / "onnx"), "--no-fuse"]
    assert main([*argv, "--data", str(deep / "photos"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["preprocessing_drift"]["cosine_min"] > 0.9999
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == "tensor(uint16)"
    for text in (
        session.get_modelmeta().custom_metadata_map["vtk"], (tmp_path / "onnx" / "model.json").read_text()
    ):  # fmt: skip
        assert json.loads(text)["input"]["value_range"] == [[0.0, 4095.0]]
    task = load_task(pack)
    for i in range(3):
        path = deep / "photos" / f"{i}.png"
        raw = np.repeat(np.asarray(Image.open(path))[..., None], 3, -1)
        found = session.run(None, {"images": raw[None]})[0]
        with torch.no_grad():
            want = task.model.eval()(task.transform(path)[None]).numpy()
        np.testing.assert_allclose(found, want, atol=0.02)


ALONE = """
import json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vtk", "vtk_export", "torch", "timm"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
import client, numpy as np
from pathlib import Path
(task,) = json.loads(Path(sys.argv[1], "client.json").read_text())["tasks"].values()
found = {}
for path in sys.argv[3:]:
    for kind in ("pixel_values", "images"):
        found[f"{kind} {Path(path).name}"] = client.load(Path(path), kind, task["input"])
np.savez(sys.argv[2], **found)
"""


@pytest.mark.parametrize("channels", [3, 13])
def test_the_client_reads_as_training_did_without_vtk(
    deep: Path, tmp_path: Path, vtk_home: Path, channels: int
) -> None:
    if channels == 3:
        photos = deep / "photos"
        pack = write_pack(tmp_path, **TWELVE)
    else:
        photos = tmp_path / "photos"
        photos.mkdir()
        for i, planes in enumerate((False, True)):
            tiff(photos / f"{i}.tif", RNG.integers(200, 2600, (30, 40, 13)).astype(np.uint16), planes=planes)
        pack = write_pack(tmp_path, 13, decoding="srgb", value_type="uint16",
                          value_range=tuple((100.0 + c, 2600.0 + c) for c in range(13)))  # fmt: skip
    repo = tmp_path / "models"
    argv = ["export", "triton", f"deep={pack}", "--backend", "vtk", "--name", "v", "--with-preproc"]
    assert main([*argv, "--data", str(photos), "--out", str(repo)]) == 0
    told = json.loads((repo / "v" / "1" / "steps.json").read_text())
    assert told["drift"]["error"] == 0 and told["drift"]["count"] == len(list(photos.iterdir()))
    config = (repo / "v" / "config.pbtxt").read_text()
    assert "TYPE_UINT16" in config and "TYPE_UINT8" not in config
    files = sorted(photos.iterdir())
    env = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", ALONE, str(repo / "v"), str(tmp_path / "found.npz"), *map(str, files)]
    subprocess.run(argv, check=True, env=env)
    found, task = np.load(tmp_path / "found.npz"), load_task(pack)
    spec = task.card.input
    for path in files:
        want = task.transform(path)
        assert np.array_equal(found[f"pixel_values {path.name}"][0], want.numpy()), path.name
        raw = found[f"images {path.name}"][0]
        assert raw.dtype == (np.uint16) and raw.shape[2] == channels
        again = eval_transform(spec)(take_image(raw, channels, Decoding.of(spec)))
        assert torch.equal(again, want), path.name
        plain = json.loads(json.dumps(spec.to_dict()))
        assert np.array_equal(vtk_images.prepare(vtk_images.from_array(raw, plain), plain), want.numpy())
    for step in ("v", "v_preprocess/1"):
        assert {f"vtk_{name}.py" for name in ("depth", "pixels", "profiles", "raw", "tiff", "images")} <= {
            path.name for path in (repo / step).iterdir()
        }


def test_copied_code_needs_pillow_and_numpy_only() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "PIL"}
    copies = decoding_code()
    for name, content in copies.items():
        for node in ast.walk(ast.parse(content)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in names:
                assert module.partition(".")[0] in allowed or f"{module}.py" in copies, (name, module)


def test_raw_images_of_tasks_have_one_type() -> None:
    signed = InputSpec(8, 8, decoding="srgb", value_range=((-9.0, 9.0),), value_type="int16")
    eight, deep = InputSpec(8, 8), InputSpec(8, 8, **TWELVE)
    for specs, kind in (((eight,), "UINT8"), ((eight, deep), "UINT16"), ((deep, signed), "FP32"), ((signed,), "INT16")):
        slot = raw_slot(specs)
        assert (slot.type, slot.dims) == (f"TYPE_{kind}", (-1, -1, 3))
    values = RNG.integers(0, 256, (9, 9, 3)).astype(np.uint16)
    shown = vtk_images.from_array(values, eight.to_dict())
    assert isinstance(shown, Image.Image) and np.array_equal(np.asarray(shown), values)
    with pytest.raises(vtk_images.Unreadable, match="values from 0 to 255"):
        vtk_images.from_array(values + 300, eight.to_dict())


def test_a_card_of_0_1_is_told_as_0_1() -> None:
    spec = read_card(Path(__file__).parents[1] / "fixtures" / "v0_1" / "digits-bf16").input
    assert spec.to_dict().keys() == {
        "height", "width", "in_chans", "mean", "std", "interpolation", "crop_pct", "resize_mode",
    }  # fmt: skip
