"""Commands whose output cannot be written: one line and exit code 3, before the work where that can be known."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.vtk._faults import files_below, tree
from vtk.__main__ import main
from vtk.card import Card
from vtk.models.create import build_model
from vtk.packs import save_task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs limits and mounts of Linux")

KWARGS = {"depth": 1, "embed_dim": 32, "num_heads": 2}
NAME = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packs, and the images of three classes."""
    root = tmp_path_factory.mktemp("things")
    torch.manual_seed(0)
    save_file(timm.create_model(NAME, **KWARGS).state_dict(), root / "base.safetensors")
    for name in ("a", "b"):
        created = build_model(NAME, num_classes=3, img_size=32, weights=root / "base.safetensors", kwargs=KWARGS)
        card = Card(model=created.spec, input=created.input, classes=("c0", "c1", "c2"))
        trained = {k for k in created.model.state_dict() if k.startswith(("head", "pos_embed"))}
        save_task(root / name, state=created.model.state_dict(), created=created, card=card, trained=trained)
    for label in range(3):
        (root / "data" / f"c{label}").mkdir(parents=True)
        for i in range(2):
            pixels = np.random.default_rng(i).integers(0, 255, (20, 20, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / "data" / f"c{label}" / f"{i}.png")
    return root


def words(things: Path, command: str) -> list[str]:
    a, b, data = (str(things / name) for name in ("a", "b", "data"))
    return {
        "export onnx": ["export", "onnx", a],
        "export tasks": ["export", "tasks", a, b],
        "export triton": ["export", "triton", a],
        "export tensorrt": ["export", "tensorrt", a],
        "export openvino": ["export", "openvino", a],
        "export aoti": ["export", "aoti", a],
        "profile": ["profile", a, "--backends", "eager", "--batch-sizes", "1", "--duration", "0.02"],
        "eval": ["eval", a, data],
        "predict": ["predict", a, data],
        "tasks bundle": ["tasks", "bundle", a],
        "tasks merge": ["tasks", "merge", a],
        "tasks convert": ["tasks", "convert", a, "--pack-dtype", "bf16"],
    }[command]


COMMANDS = (
    "export onnx", "export tasks", "export triton", "export tensorrt", "export openvino", "export aoti", "profile",
    "eval", "predict", "tasks bundle", "tasks merge", "tasks convert",
)  # fmt: skip
SUFFIX = {"tasks merge": ".safetensors", "predict": ".csv"}
LONG = {
    "export onnx",
    "export tasks",
    "export triton",
    "export tensorrt",
    "export openvino",
}  # what the disk is full for is made first


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "read-only"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", mount], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("cannot mount a read-only file system here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of a command that ends with exit code 3."""
    capsys.readouterr()
    assert main([*argv, "--json"]) == 3
    told = capsys.readouterr()
    (line,) = [line for line in told.err.splitlines() if "error:" in line]
    assert json.loads(told.out.splitlines()[-1])["exit_code"] == 3
    assert "Traceback" not in told.err
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_read_only_disk(command: str, things: Path, read_only: Path, capsys, monkeypatch) -> None:
    def late(*_: object, **__: object) -> None:
        pytest.fail("the model was compiled first")

    monkeypatch.setattr("torch.onnx.export", late)
    monkeypatch.setattr("torch._inductor.aot_compile", late)
    out = read_only / f"x{SUFFIX.get(command, '')}"
    line = refusal([*words(things, command), "--out", str(out)], capsys)
    assert "cannot " in line and "ead-only" in line and "free some space" not in line, line
    if command == "export aoti":  # a folder that is there already
        line = refusal([*words(things, command), "--out", str(read_only)], capsys)
        assert "read-only; choose another folder" in line


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=pytest.mark.slow) if c in LONG else c
        for c in COMMANDS
        if c not in ("export aoti", "predict")  # the compiler has files of its own; a few predictions always fit
    ],
)
def test_a_full_disk_leaves_what_was_there(command: str, things: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / f"x{SUFFIX.get(command, '')}"
    with files_below(1200):
        line = refusal([*words(things, command), "--out", str(out)], capsys)
    assert "cannot write" in line and "File too large" in line and "free some space" in line, line
    left = tree(tmp_path)
    assert not [name for name in left if ".tmp" in name or "staging" in name or "export-tmp" in name]
    assert not [name for name in left if name.endswith((".onnx", ".safetensors", ".engine"))]
