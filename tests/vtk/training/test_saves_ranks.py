"""Several processes (torchrun, gloo on the CPU) that are stopped within an epoch, and go on there to the last bit."""

import json
import os
import subprocess
import sys

import pytest

from tests.vtk.training.engine.test_save_schedule import same
from tests.vtk.training.test_resume import LEVIT

SCRIPT = """
import dataclasses, hashlib, json, os, signal, sys
from pathlib import Path
import torch
from vtk.errors import StoppedError
from vtk.training.engine import loop
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs.joint import open_joint_run
from vtk.training.runs.pack_writer import PackWriter
from vtk.training.runs.run import open_run
from vtk.training.engine.loop import Loop
from vtk.training.engine.save_schedule import Saves

torch.set_num_threads(1)
rank, out, told = int(os.environ["RANK"]), Path(sys.argv[2]), {}
given = json.loads(sys.argv[3])
tasks = tuple(given.pop("tasks", ()))
config = FinetuneConfig(
    data=None if tasks else Path(sys.argv[1]), out=out / "whole", tasks=tasks, pretrained=False, img_size=32, epochs=2,
    batch_size=4, lr=2e-3, head_lr_mult=1.0, workers=0, device="cpu", ema=0.9,
    **{"model": "vit_tiny_patch16_224", "model_kwargs": ("depth=1", "embed_dim=32", "num_heads=2"), **given},
)
loop._INTERVAL = 5  # nine steps an epoch

def go(name, **changes):
    try:
        with (open_joint_run if tasks else open_run)(dataclasses.replace(config, **changes), PackWriter) as run:
            run.go()
    except StoppedError as error:
        told[name] = str(error), error.exit_code
        return
    digest = hashlib.sha256()
    for key, value in run.prepared.model.state_dict().items():
        digest.update(key.encode() + value.contiguous().numpy().tobytes())
    told[name] = digest.hexdigest()

go("whole")
tell = Loop._tell
def signalled(self, *args):
    tell(self, *args)
    if rank == 1 and self.step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
Loop._tell = signalled
go("signalled", out=out / "parts")
Loop._tell = tell

class Death(Exception):
    pass
saved, count = Saves.saved, []
def dies(self):
    saved(self)
    count.append(0)
    if len(count) == 3:  # the end of the first epoch is one of them
        raise Death
Saves.saved = dies
try:
    go("died", out=out / "parts", resume=True, save_every="7")
except Death:
    told["died"] = True
torch.distributed.barrier()  # the main process has written what both go on from
Saves.saved = saved
go("parts", out=out / "parts", resume=True)
(out / f"rank{rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one task", "statistics of BatchNorm", "several tasks"])
def test_two_processes_go_on_within_an_epoch(photos, tmp_path, vtk_home, kind):
    """A signal to one of them ends both, after a step at which they look at each other; each has its own numbers."""
    given = {
        "one task": {"drop_path": 0.2, "mixup": 0.5},
        "statistics of BatchNorm": {**LEVIT, "train": "full"},
        "several tasks": {"drop_path": 0.2, "mixup": 0.5, "tasks": [f"a={photos}", f"b={photos}@48"]},
    }[kind]
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(photos), str(tmp_path), json.dumps(given)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert one == two
    assert one["signalled"][1] == 143 and "stopped by SIGTERM after step 5 of epoch 1, saved in" in one["signalled"][0]
    assert one["died"] is True and one["parts"] == one["whole"]
    same(tmp_path / "whole", tmp_path / "parts")
