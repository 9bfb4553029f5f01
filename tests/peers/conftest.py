"""Other interpreters that have the peers' tools and no vtk: `make test-peers` makes them.

VTK_PEERS names the one with all tools, VTK_OLD_ORT one with an old ONNX Runtime.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from vtk.card import Card
from vtk.models.create import build_model
from vtk.packs import save_task

NAME = "vit_tiny_patch16_224"
KWARGS = {"depth": 2, "embed_dim": 48, "num_heads": 2}
ALONE = """
import importlib.util
for name in ("vtk", "vtk_kernels", "vtk_export"):
    assert importlib.util.find_spec(name) is None, name + " is here: this proves nothing about plain tools"
import numpy as np
images = np.load("images.npy")
"""

Foreign = Callable[[str], np.ndarray]


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((5, 3, 32, 32)).astype(np.float32)


@pytest.fixture
def foreign(tmp_path: Path, images: np.ndarray) -> Foreign:
    """Run code in the other environment, in the test's folder; it finds ``images`` and leaves ``logits``."""
    python = os.environ.get("VTK_PEERS")
    if python is None:
        pytest.fail("VTK_PEERS names no interpreter with the peers' tools; run `make test-peers`")
    np.save(tmp_path / "images.npy", images)

    def run(code: str) -> np.ndarray:
        # -I: neither PYTHONPATH nor this folder may bring vtk along
        whole = f"{ALONE}\n{code}\nnp.save('logits.npy', np.asarray(logits))\n"
        done = subprocess.run([python, "-I", "-c", whole], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return np.load(tmp_path / "logits.npy")

    return run


@pytest.fixture
def old(tmp_path: Path, images: np.ndarray) -> Callable[[str], str]:
    """Run code in the environment of an old ONNX Runtime, in the test's folder; returns what it prints."""
    python = os.environ.get("VTK_OLD_ORT")
    if python is None:
        pytest.fail("VTK_OLD_ORT names no interpreter with an old ONNX Runtime; run `make test-peers`")
    np.save(tmp_path / "images.npy", images)

    def run(code: str) -> str:
        session = (
            "import onnxruntime\n"
            "def session(path):\n"
            "    return onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])\n"
        )
        argv = [python, "-I", "-c", f"{ALONE}\n{session}\n{code}\n"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Base weights for 224 px and a thousand classes."""
    torch.manual_seed(1)
    save_file(timm.create_model(NAME, **KWARGS).state_dict(), tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


@pytest.fixture
def pack(weights: Path, tmp_path: Path) -> Path:
    """A pack whose attention and classifier are far from its base's."""
    created = build_model(NAME, num_classes=3, img_size=32, weights=weights, kwargs=KWARGS)
    state = created.model.state_dict()
    trained = [k for k in state if ".attn." in k or k.startswith(("head.", "pos_embed"))]
    for key in trained:
        state[key] = state[key] + 0.1 * torch.randn_like(state[key])
    card = Card(created.spec, created.input, ("ant", "bee", "cow"))
    save_task(tmp_path / "pack", state=state, created=created, card=card, trained=trained)
    return tmp_path / "pack"
