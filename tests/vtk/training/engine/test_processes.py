"""Several processes: what each takes of a batch, and a real run with two of them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vtk.data.audit.result import Sample
from vtk.errors import UsageError
from vtk.training.engine.processes import Ranks, find_device, open_ranks
from vtk.training.engine.streams import ImageStream, share
from vtk.training.runs.scoring import default_workers, evaluate_ranks

CPU = torch.device("cpu")


def small(image):
    return torch.tensor(list(image.resize((2, 2)).tobytes()), dtype=torch.float32).reshape(2, 2, 3).permute(2, 0, 1)


def stream(photos, world, rank, batch_size=8, count=36):
    files = sorted((photos / "train").rglob("*.png"))[:count]
    samples = [Sample(path, i) for i, path in enumerate(files)]
    ranks = Ranks(CPU, rank, world)
    return ImageStream(samples, small, batch_size=batch_size, seed=3, workers=0, ranks=ranks)


@pytest.mark.parametrize(("world", "count"), [(2, 36), (2, 33), (4, 35), (4, 36)])
def test_ranks_share_the_batches_of_a_single_process(photos, world, count):
    alone = stream(photos, 1, 0, count=count)
    parts = [stream(photos, world, rank, count=count) for rank in range(world)]
    whole = [b.labels.tolist() for b in alone.epoch(1)]
    if len(whole[-1]) < world:
        whole.pop()
    shares = [[b.labels.tolist() for b in part.epoch(1)] for part in parts]
    assert all(list(part.sizes) == [len(b) for b in whole] for part in parts)
    for i, labels in enumerate(whole):
        assert [s[i] for s in shares] == [labels[rank::world] for rank in range(world)]
    seen = [label for batch in whole for label in batch]
    assert len(seen) == len(set(seen))


def test_epochs_differ_and_repeat(photos):
    a = stream(photos, 1, 0)
    first = [b.labels.tolist() for b in a.epoch(0)]
    assert first != [b.labels.tolist() for b in a.epoch(1)]
    assert first == [b.labels.tolist() for b in a.epoch(0)]


def test_batch_size_must_be_a_multiple(photos):
    with pytest.raises(UsageError, match=r"--batch-size` 8 is shared by 3 processes"):
        stream(photos, 3, 0)


def test_evaluation_is_dealt_out_in_whole_batches(photos):
    alone = stream(photos, 1, 0)._loader
    batches = [labels.tolist() for _, labels in alone]
    dealt = [[labels.tolist() for _, labels in share(alone, Ranks(CPU, r, 2), whole=True)] for r in range(2)]
    assert dealt == [batches[0::2], batches[1::2]]


class Gathered(Ranks):
    """Rank 0 of two, given what the other one has."""

    def __init__(self, other):
        super().__init__(CPU, 0, 2)
        self.other = other

    def gather(self, value):
        return [value, self.other]


def test_evaluation_by_two_ranks_equals_one(photos):
    loader = stream(photos, 1, 0)._loader
    loader.dataset.samples = [Sample(s.path, s.label % 3) for s in loader.dataset.samples]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)).eval()
    classes = ("a", "b", "c")
    alone = evaluate_ranks(model, loader, classes, Ranks(CPU), show_progress=False)
    with torch.no_grad():
        theirs = [(model(x), y) for x, y in share(loader, Ranks(CPU, 1, 2), whole=True)]
    both = evaluate_ranks(model, loader, classes, Gathered(theirs), show_progress=False)
    assert (both.top1, both.top5, both.loss, both.count) == (alone.top1, alone.top5, alone.loss, 36)
    assert (both.confusion == alone.confusion).all()


def test_devices(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_device("cpu") == CPU
    assert open_ranks("cpu").main
    for text in ("tpu", "cpu:1", "cuda:x"):
        with pytest.raises(UsageError, match="--device"):
            find_device(text)
    assert default_workers(3) == 3 and 1 <= default_workers(None) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("train", ["attn", "lora"])
def test_two_processes_train_as_one(config, photos, tmp_path, vtk_home, train):
    """torchrun and gloo on the CPU: loss, metric and weights are those of one process up to rounding."""
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    flags = [
        "--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=2,embed_dim=32,num_heads=2", "--no-pretrained",
        "--img-size", "32", "--epochs", "2", "--batch-size", "8", "--lr", "2e-3", "--head-lr-mult", "1",
        "--workers", "0", "--device", "cpu", "--accumulate", "2", "--eval-batch-size", "4", "--train", train,
    ]  # fmt: skip
    run = [torchrun, "--standalone", "--nproc_per_node", "2", "-m", "vtk", "finetune", str(photos), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for extra in (["--stop-after", "1"], ["--resume"]):
        out = ["--out", str(tmp_path / "two"), *extra]
        done = subprocess.run([*run, *out], env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    from vtk.training.finetune import finetune

    one = finetune(config(accumulate=2, eval_batch_size=4, out=tmp_path / "one", train=train))
    rows = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for mine, theirs in zip(one.rows, rows, strict=True):
        for key in ("loss", "val_loss", "val_top1", "lr"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-4), key
    from safetensors.torch import load_file

    a, b = (load_file(tmp_path / name / "task-last" / "task.safetensors") for name in ("one", "two"))
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[n], b[n], atol=1e-4) for n in a)
    assert done.stdout.count("best epoch") == 1  # only one of them talks
