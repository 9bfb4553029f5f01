"""Other interpreters that have the peers' tools and no vtk: `make test-peers` makes them.

VTK_PEERS names the one with most tools, VTK_OLD_ORT one with an old ONNX Runtime, VTK_COREML, VTK_LITERT and
VTK_ONNX2TF those of converters that need other packages, and VTK_NODE a folder with npm's packages. What passes is
recorded (`tests/peers/_records.py`) for the table of the documents.
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

from tests.peers._records import Row, keep_report, version_of
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

Foreign = Callable[..., np.ndarray]
Record = Callable[..., None]


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((5, 3, 32, 32)).astype(np.float32)


def interpreter(variable: str) -> str:
    """Return the path that an environment variable of `make test-peers` has."""
    found = os.environ.get(variable)
    if found is None:
        pytest.fail(f"{variable} names nothing with a peer's tools; run `make test-peers`")
    return found


@pytest.fixture
def foreign(tmp_path: Path, images: np.ndarray) -> Foreign:
    """Run code in another environment, in the test's folder; it finds ``images`` and leaves ``logits``."""
    np.save(tmp_path / "images.npy", images)

    def run(code: str, variable: str = "VTK_PEERS", **environment: str) -> np.ndarray:
        # -I: neither PYTHONPATH nor this folder may bring vtk along
        whole = f"{ALONE}\n{code}\nnp.save('logits.npy', np.asarray(logits))\n"
        done = subprocess.run(
            [interpreter(variable), "-I", "-c", whole], cwd=tmp_path, capture_output=True, text=True, timeout=600,
            env=os.environ | {"HOME": str(tmp_path)} | environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return np.load(tmp_path / "logits.npy")

    return run


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Keep what a tool did with a file of ours, if the test passes."""

    def keep(
        tool: str, file: str, *, outcome: str = "run", by: str = "VTK_PEERS", difference: float | None = None
    ) -> None:
        row = Row(tool, version_of(tool, interpreter(by)), file, outcome, difference)
        request.node.user_properties.append(("peer", row))

    return keep


@pytest.fixture
def old(tmp_path: Path, images: np.ndarray) -> Callable[[str], str]:
    """Run code in the environment of an old ONNX Runtime, in the test's folder; returns what it prints."""
    python = interpreter("VTK_OLD_ORT")
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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test recorded, once it is known whether it passed."""
    if (path := os.environ.get("VTK_PEER_RECORDS")) is not None:
        keep_report(report, Path(path))
