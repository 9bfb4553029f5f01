"""The options of a run with two processes, stopped and gone on with: what one process does, up to rounding."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vtk.training.finetune import finetune, finetune_tasks

FLAGS = (
    "--model vit_tiny_patch16_224 --model-kwargs depth=2,embed_dim=32,num_heads=2 --no-pretrained --img-size 32 "
    "--epochs 2 --batch-size 8 --lr 2e-3 --head-lr-mult 1 --workers 0 --device cpu --eval-batch-size 4"
).split()
ONE = {"ema": 0.9, "sampler": "balanced", "layer_decay": 0.8, "metric": "loss", "patience": 3, "optimizer": "lamb"}
CASES = {
    "one label": ONE,
    "several labels": {"multi_label": True, "class_weights": "balanced", "ema": 0.9},
    "class weights": {"class_weights": "balanced", "accumulate": 2},
    "several tasks": {"class_weights": "balanced", "ema": 0.9, "layer_decay": 0.8, "track": ("tensorboard",)},
}


def words(changes):
    for key, value in changes.items():
        flag = f"--{key.replace('_', '-')}"
        yield from [flag] if value is True else [flag, ",".join(value) if isinstance(value, tuple) else str(value)]


@pytest.fixture(scope="module")
def uneven(photos, tmp_path_factory):
    """The photographs with 12, 6 and 3 training images: weights differ, and the last batch is not full."""
    root = tmp_path_factory.mktemp("uneven") / "photos"
    shutil.copytree(photos, root)
    for name, count in (("green", 6), ("red", 3)):
        for i in range(count, 12):
            (root / "train" / name / f"{i}.png").unlink()
    return root


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_do_what_one_does(config, uneven, tmp_path, vtk_home, case):
    changes, out = CASES[case], tmp_path / "two"
    tasks = {"tasks": (f"a={uneven}", f"b={uneven}")} if case == "several tasks" else {}
    data = [w for task in tasks["tasks"] for w in ("--task", task)] if tasks else [str(uneven)]
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    start = [torchrun, "--standalone", "--nproc_per_node", "2", "-m", "vtk", "finetune", *data, *FLAGS]
    for extra in (["--stop-after", "1"], ["--resume"]):
        argv = [*start, *words(changes), "--out", str(out), *extra]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    one = config(out=tmp_path / "one", eval_batch_size=4, **changes, data=None if tasks else uneven, **tasks)
    runs = finetune_tasks(one).tasks if tasks else {"": finetune(one)}
    for name, run in runs.items():
        rows = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        for mine, theirs in zip(run.rows, rows, strict=True):
            for key in ("loss", "val_loss", "lr"):
                assert theirs[key] == pytest.approx(mine[key], rel=2e-4), (name, key)
        mine, theirs = (load_file(p / "task-last/task.safetensors") for p in (run.out, out / name))
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[n], theirs[n], atol=2e-4) for n in mine), name
