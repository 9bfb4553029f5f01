"""The main job through the command line, on scikit-learn's digits: finetune, eval, predict, merge, export, profile.

What each step says is checked against plain timm, PIL, numpy and onnxruntime.
"""

import csv
import json
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import vtk
from vtk.__main__ import main
from vtk.data.digits import write_digits

KWARGS = {"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
FLAGS = [
    "--attn-only", "--no-pretrained", "--model", "vit_tiny_patch16_224", "--model-kwargs",
    ",".join(f"{k}={v}" for k, v in KWARGS.items()), "--img-size", "32", "48", "--epochs", "2", "--lr", "1e-3",
    "--workers", "0", "--hflip", "0", "--device", "cpu",
]  # fmt: skip


class Job:
    """A finished run and the folders around it."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.data = write_digits(root / "data", "digits", limit=40)
        self.run = root / "run"
        self.result = self.vtk("finetune", self.data, "--out", self.run, *FLAGS)
        self.pack = self.run / "task"

    def vtk(self, *argv: object, code: int = 0) -> dict[str, Any]:
        """Run a command with --json and return its object."""
        out = self.root / "stdout"
        with out.open("w") as stdout, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            patch.setenv("VTK_HOME", str(self.home))
            assert main([*map(str, argv), "--json"]) == code
        return json.loads(out.read_text())

    @cached_property
    def exported(self) -> dict[str, Any]:
        """What the export to ONNX said; torch's exporter takes seconds."""
        return self.vtk("export", "onnx", self.pack, "--out", self.root / "onnx", "--data", self.data / "val")

    def images(self) -> tuple[list[Path], np.ndarray, list[str]]:
        """Decode the held-out images by hand: 8×8 grey to 32×48 by timm's own resize and crop, then normalised."""
        paths = sorted((self.data / "val").rglob("*.png"))
        size = {
            "input_size": (3, 32, 48),
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "mean": (0.5,) * 3,
            "std": (0.5,) * 3,
        }
        transform = timm.data.create_transform(**size, is_training=False)
        batch = np.stack([transform(Image.open(p).convert("RGB")).numpy() for p in paths])
        return paths, batch, [p.parent.name for p in paths]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


def top1(logits: np.ndarray, names: list[str], classes: list[str]) -> float:
    return float(np.mean([classes[i] == name for i, name in zip(logits.argmax(1), names, strict=True)]))


def test_the_run_leaves_what_it_promises(job: Job) -> None:
    names = {p.name for p in job.run.iterdir()}
    assert {"task", "task-last", "last", "config.yaml", "metrics.csv", "metrics.jsonl", "curves.png", "confusion.png",
            "per_class.csv", "audit.json", "census.json"} <= names  # fmt: skip
    assert not [n for n in names if ".tmp" in n or n.endswith(".old")]
    rows = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in rows] == [1, 2]
    assert max(r["val_top1"] for r in rows) == job.result["top1"]


def test_eval_of_the_pack_gives_the_runs_metric_exactly(job: Job) -> None:
    result = job.vtk("eval", job.pack, job.data)
    assert (result["top1"], result["loss"]) == (job.result["top1"], job.result["loss"])


def test_plain_timm_with_the_merged_checkpoint_has_the_same_accuracy(job: Job) -> None:
    file = job.root / "merged.safetensors"
    job.vtk("tasks", "merge", job.pack, "--out", file)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=(32, 48), **KWARGS)
    model.load_state_dict(load_file(file), strict=True)
    _, batch, names = job.images()
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(batch)).numpy()
    assert top1(logits, names, [str(i) for i in range(10)]) == pytest.approx(job.result["top1"], abs=1e-9)
    assert job.vtk("eval", file, job.data)["top1"] == job.result["top1"]


def test_a_fresh_process_computes_the_same_bits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, torch, vtk\ntorch.set_num_threads(1)\ntask = vtk.load_task(sys.argv[1])\n"
        "torch.manual_seed(0)\nprint(task.model(torch.randn(2, 3, 32, 48)).double().sum().item().hex())"
    )
    monkeypatch.setenv("VTK_HOME", str(job.home))
    run = subprocess.run([sys.executable, "-c", code, job.pack], capture_output=True, text=True, check=True)
    torch.manual_seed(0)
    with torch.no_grad():
        mine = vtk.load_task(job.pack).model(torch.randn(2, 3, 32, 48)).double().sum().item()
    assert float.fromhex(run.stdout.strip()) == mine


def test_onnx_predicts_what_torch_predicts(job: Job) -> None:
    exported = job.exported
    session = onnxruntime.InferenceSession(exported["path"], providers=["CPUExecutionProvider"])
    paths, batch, names = job.images()
    (logits,) = session.run(["logits"], {"pixel_values": batch})
    card = json.loads((job.root / "onnx" / "model.json").read_text())
    assert top1(logits, names, card["classes"]) == pytest.approx(job.result["top1"], abs=1e-9)
    result = job.vtk("eval", exported["path"], job.data, "--reference", job.pack)
    assert result["top1"] == job.result["top1"]
    assert result["agreement"] == 1.0
    table = job.root / "predictions.csv"
    job.vtk("predict", exported["path"], job.data / "val", "--top-k", "2", "--out", table)
    with table.open(newline="") as file:
        rows = {Path(row["path"]).name: row for row in csv.DictReader(file)}
    for path, row in zip(paths, logits, strict=True):
        assert rows[path.name]["label1"] == card["classes"][int(row.argmax())]
        scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        assert float(rows[path.name]["score1"]) == pytest.approx(scores.max(), abs=1e-4)


def test_profile_of_the_exported_file(job: Job) -> None:
    result = job.vtk("profile", job.exported["path"], "--batch-sizes", "1,2", "--duration", "0.2", "--threads", "1",
                     "--out", job.root / "profile")  # fmt: skip
    assert {p.name for p in (job.root / "profile").iterdir()} == {
        "report.html", "latency.png", "profile.json", "profile.csv",
    }  # fmt: skip
    assert json.loads((job.root / "profile" / "profile.json").read_text()) == result


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--pack-dtype", "bf16"], marks=pytest.mark.slow),
        ["--pack-dtype", "int8"],
        pytest.param(["--precision", "bf16"], marks=pytest.mark.slow),
        ["--precision", "bf16", "--pack-dtype", "bf16"],
    ],
    ids=" ".join,
)
def test_flat_folders_and_rounded_packs_repeat_their_metric_too(job: Job, tmp_path: Path, flags: list[str]) -> None:
    """A flat folder is divided the same way again, and a bf16 pack's card tells what the stored pack measures."""
    flat = job.data / "train"
    run = job.vtk("finetune", flat, "--out", tmp_path / "run", *FLAGS, *flags, "--epochs", "1", "--val-split", "0.25")
    result = job.vtk("eval", tmp_path / "run" / "task", flat)
    assert (result["top1"], result["loss"]) == (run["top1"], run["loss"])
    assert result["count"] == 80
