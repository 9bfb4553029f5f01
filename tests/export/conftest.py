"""One trained-looking pack and two exports of it, made once: torch's exporter takes seconds."""

import contextlib
import copy
import functools
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests._plots import not_drawn
from tests.export._calibrated import calibrate
from tests.export._fake_server import load  # noqa: F401 - a fixture
from vtk.__main__ import main
from vtk.card import Card
from vtk.models.create import build_model
from vtk.packs.pack import save_task

_registry = ONNXRegistry.from_torchlib.__func__


@functools.cache
def _registry_once(cls: type[ONNXRegistry], opset: int) -> ONNXRegistry:
    return _registry(cls, opset)


@pytest.fixture(scope="session", autouse=True)
def _exporters_functions_once() -> Iterator[None]:
    """torch's exporter looks at two thousand functions before each model, a third of its time; they stay the same."""

    def from_torchlib(cls: type[ONNXRegistry], opset_version: int) -> ONNXRegistry:
        found = copy.copy(_registry_once(cls, opset_version))
        found.functions = {name: list(metas) for name, metas in found.functions.items()}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", classmethod(from_torchlib))
        yield


@pytest.fixture(autouse=True)
def _cheap_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture and the collections of garbage take longer than what is measured; tests of profiles have both."""
    monkeypatch.setattr("vtk.profiling.plot.latency_png", lambda *_, **__: not_drawn())
    monkeypatch.setattr("vtk.profiling.memory.gc", SimpleNamespace(collect=lambda: 0))


TIMM = {"depth": 1, "embed_dim": 32, "num_heads": 2}


@dataclass
class Packed:
    """A pack of a ViT of one block, 32 px high and 48 wide, and photographs."""

    path: Path
    photos: Path
    card: Card

    def model(self) -> nn.Module:
        """The timm model, built from the pack's and the base's files alone."""
        model = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=(32, 48), **TIMM)
        base = load_file(self.path.parent / "base.safetensors")
        model.load_state_dict(base | load_file(self.path / "task.safetensors"), strict=True)
        return model.eval()


def make_pack(root: Path, noise: float) -> Packed:
    """Write a pack whose attention and head were moved from the base by ``noise``."""
    torch.manual_seed(2)
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32, **TIMM)
    save_file(plain.state_dict(), root / "base.safetensors")
    created = build_model(
        "vit_tiny_patch16_224", num_classes=5, img_size=(32, 48), weights=root / "base.safetensors", kwargs=TIMM
    )
    state = {k: v.clone() for k, v in created.model.state_dict().items()}
    trained = [k for k in state if ".attn." in k or k.startswith("head.")]
    for name in trained:
        state[name] += noise * torch.randn_like(state[name])
    card = Card(created.spec, created.input, ("a", "b", "c", "d", "é"))
    card = save_task(root / "task", state=state, created=created, card=card, trained=trained)
    rng = np.random.default_rng(0)
    for i in range(6):
        (root / "photos" / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(root / "photos" / "a" / f"{i}.png")
    return Packed(root / "task", root / "photos", card)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return make_pack(tmp_path_factory.mktemp("packed"), 1.0)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """A pack whose attention is as soft as a trained one's: rounding does not change where it looks."""
    return make_pack(tmp_path_factory.mktemp("calm"), 0.1)


@dataclass
class Run:
    """What ``vtk export onnx … --json`` left."""

    out: Path
    result: dict[str, Any]
    stdout: str
    stderr: str

    @property
    def proto(self) -> onnx.ModelProto:
        return onnx.load(self.out / "model.onnx")


def _export(*argv: object) -> Run:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        # the graph as timm wrote it: the tests find its weights by timm's names
        code = main(["export", "onnx", *map(str, argv), "--no-fuse", "--json"])
    assert code == 0, err.getvalue()
    return Run(Path(str(argv[argv.index("--out") + 1])), json.loads(out.getvalue()), out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def exported(packed: Packed, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Any batch size, verified on photographs."""
    return _export(packed.path, "--out", tmp_path_factory.mktemp("any") / "onnx", "--data", packed.photos)


@pytest.fixture(scope="session")
def exported_static(packed: Packed, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Batch of two only, another opset."""
    out = tmp_path_factory.mktemp("two") / "onnx"
    return _export(packed.path, "--out", out, "--static-batch", 2, "--opset", 20)


@pytest.fixture(scope="session")
def exported_calm(calm: Packed, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of the calm pack, any batch size."""
    return _export(calm.path, "--out", tmp_path_factory.mktemp("calm") / "onnx")


Convert = Callable[[Callable[[onnx.ModelProto], None] | None], None]


@pytest.fixture
def fake_exporter(exported: Run, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Make torch's exporter return an earlier result, with a fault put in; saves its seconds."""
    return _faker(exported, monkeypatch)


@pytest.fixture
def fake_calm(exported_calm: Run, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """The same of the calm pack."""
    return _faker(exported_calm, monkeypatch)


@pytest.fixture
def calibrated(calm: Packed, fake_calm: Convert, tmp_path: Path) -> Path:
    """The calm pack with a temperature and scores (`tests.export._calibrated`)."""
    fake_calm()
    path = tmp_path / "calibrated"
    shutil.copytree(calm.path, path)
    calibrate(path, calm.model())
    return path


def _faker(run: Run, monkeypatch: pytest.MonkeyPatch) -> Convert:
    def use(fault: Callable[[onnx.ModelProto], None] | None = None) -> None:
        def convert(*args: object, **kwargs: object) -> onnx.ModelProto:
            proto = run.proto
            if fault is not None:
                fault(proto)
            return proto

        monkeypatch.setattr("vtk_export.onnx.build.convert", convert)

    return use
