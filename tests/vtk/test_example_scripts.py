"""The scripts in examples/ run, share FFN tensors as they say, and are better than chance."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, jaccard_score

from tests.vtk._example_output import JOBS, RECORDED, differences
from tests.vtk._example_output import run as run_recorded
from vtk.data.loading.samplers import EpochSampler
from vtk.packs.cards import read_card

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{Path(path).stem}", EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def metric() -> Any:
    return load("reid/metric.py")


def run(script: str, out: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--out", str(out)], capture_output=True, text=True, timeout=900,
        check=False, cwd=out.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_people_never_trained_on_are_found_again(tmp_path: Path) -> None:
    said = run("reid/main.py", tmp_path / "out")
    assert "the same 16 FFN tensors" in said
    found = read_card(tmp_path / "out" / "task").metrics
    assert found["mAP"] > 0.55 and found["rank1"] > 0.7  # untrained: 0.3 and 0.3; of 16 people by chance: 0.06
    # of six colours; the most frequent alone: under 0.25
    assert read_card(tmp_path / "out" / "trousers" / "task").metrics["top1"] > 0.5


@pytest.mark.slow
def test_pixels_are_told_apart(tmp_path: Path) -> None:
    said = run("segmentation/main.py", tmp_path / "out")
    assert "the same 16 FFN tensors" in said
    scores = {name: read_card(tmp_path / "out" / name / "task").metrics["mIoU"] for name in ("linear", "uper+CB")}
    assert min(scores.values()) > 0.65, scores  # one class everywhere: 0.19
    assert scores["uper+CB"] > scores["linear"]
    for task, least in (("base", 0.8), ("crops", 0.8)):  # of three classes each
        assert read_card(tmp_path / "out" / task / "task").metrics["top1"] > least, task


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_an_example_prints_what_is_recorded(name: str, tmp_path: Path) -> None:
    recorded = (EXAMPLES / name / "output.txt").read_text("utf-8")
    assert not differences(recorded, run_recorded(name, tmp_path)), "python tests/vtk/_example_output.py --write"


def test_every_example_is_run() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/main.py")} == {*RECORDED, "reid", "segmentation"}


@pytest.mark.parametrize("name", JOBS)
def test_an_example_of_a_job_is_short_and_uses_public_names(name: str) -> None:
    code = (EXAMPLES / name / "main.py").read_text("utf-8")
    assert len(code.splitlines()) <= 60
    modules = {node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
    modules |= {a.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import) for a in node.names}
    assert {m for m in modules if m is not None and m.startswith("vtk")} <= {"vtk", "vtk.data.digits"}


RECORD = "best epoch 6: top-1 85.2 %, loss 0.36\nerror 2.3e-06\na.png: 3\n359 images in 0.7 s\n"


@pytest.mark.parametrize(("printed", "same"), [
    (RECORD, True),
    ("best  epoch 5: top-1 80.1 %, loss 0.51\nerror 1.1e-05\na.png: 4\n359 images in 9.0 s\n", True),
    ("epoch 1/6: 736/1438 images, 71 images/s, 10 s left loss 2.254\n" + RECORD, True),
    (RECORD.replace("85.2", "55.2"), False), (RECORD.replace("0.36", "1.36"), False), (RECORD + "more\n", False),
    (RECORD.replace("e-06", "e-03"), False), (RECORD.replace("359", "358"), False),
    (RECORD.replace("0.7 s", "0.7"), False),
    (RECORD.replace("error", "difference"), False), (RECORD.removesuffix("359 images in 0.7 s\n"), False),
])  # fmt: skip
def test_a_record_agrees_with_another_machine_and_not_with_another_program(printed: str, same: bool) -> None:
    assert (differences(RECORD, printed) == []) is same


def test_map_is_scikit_learns(metric: Any) -> None:
    random = np.random.default_rng(0)
    people, cameras = random.integers(0, 5, 40), random.integers(0, 4, 40)
    people[:20] = np.arange(20) % 5  # everyone is in the gallery
    cameras[:20] = 1
    embedded = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(embedded.double(), dim=1)
    likeness, wanted, first = (unit @ unit.T).numpy(), [], []
    for query in np.nonzero(cameras == 0)[0]:
        gallery = np.nonzero(cameras != 0)[0]
        right = people[gallery] == people[query]
        wanted.append(average_precision_score(right, likeness[query, gallery]))
        first.append(right[likeness[query, gallery].argmax()])
    assert metric.rank(embedded, people, cameras) == pytest.approx((np.mean(wanted), np.mean(first)))


def test_batch_hard_takes_the_farthest_positive_and_the_nearest_negative(metric: Any) -> None:
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64), [0, 0, 1, 1, 2, 2, 2, 2]
    wanted = []
    for i in range(8):
        off = [float((x[i] - x[j]).norm()) for j in range(8)]
        far = max(off[j] for j in range(8) if y[j] == y[i] and j != i)
        near = min(off[j] for j in range(8) if y[j] != y[i])
        wanted.append(max(0.0, 0.3 + far - near))
    x.requires_grad_()
    loss = metric.batch_hard(x, torch.tensor(y), 0.3)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(np.mean(wanted)) and bool(x.grad.isfinite().all())


def test_batches_hold_k_images_of_p_people_and_an_epoch_every_image(metric: Any) -> None:
    labels = [i // 8 for i in range(6 * 8)]
    sampler = metric.PkSampler(labels, 3, 4, seed=1)
    assert isinstance(sampler, EpochSampler) and len(sampler) == 48
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        orders.append([i for _, i in sampler])
        for start in range(0, 48, 12):
            found = [labels[i] for i in orders[-1][start : start + 12]]
            assert sorted(map(found.count, set(found))) == [4, 4, 4]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(48)) and orders[0] != orders[1]
    with pytest.raises(ValueError, match="do not go into batches"):
        metric.PkSampler(labels, 4, 4, seed=1)


def test_mean_iou_is_scikit_learns() -> None:
    heads = load("segmentation/heads.py")
    generator = torch.Generator().manual_seed(0)
    logits, masks = torch.randn(60, 4, 6, 6, generator=generator), torch.randint(0, 4, (60, 6, 6), generator=generator)
    found = heads.mean_iou(torch.nn.Identity(), logits, masks, 4)
    wanted = jaccard_score(masks.flatten(), logits.argmax(1).flatten(), average="macro")
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["Linear", "Uper"])
def test_heads_are_made_of_what_they_say(name: str) -> None:
    heads = load("segmentation/heads.py")
    head = getattr(heads, name)(16, 4, 3)
    maps = [torch.randn(2, 16, 5, 5) for _ in range(3)]
    logits = head(maps)
    assert logits.shape == (2, 4, *((10, 10) if name == "Uper" else (5, 5)))
    logits.sum().backward()
    assert all(p.grad is not None for p in head.parameters())
