"""Several processes: the same weights on all, the same metric for any number of them, and the same after a stop."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.vtk._faults import tree
from vtk.data.audit.result import Sample
from vtk.data.loading.loader import make_loader
from vtk.training.engine.processes import Ranks
from vtk.training.engine.streams import share
from vtk.training.runs.scoring import evaluate_ranks

CPU = torch.device("cpu")
CLASSES = ("a", "b", "c")


def pixels(image):
    return torch.tensor(list(image.resize((4, 4)).tobytes()), dtype=torch.float32).reshape(48) / 255


@pytest.fixture(scope="module")
def judged(photos):
    """A model, and a function that opens its images in batches of a given size."""
    files = sorted((photos / "train").rglob("*.png"))[:31]
    samples = [Sample(path, i % 3) for i, path in enumerate(files)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 8), nn.GELU(), nn.Linear(8, 3)).eval()
    return model, lambda size: make_loader(samples, pixels, batch_size=size, shuffle=False, seed=0, workers=0)


class Among(Ranks):
    """Rank 0 of several, given what the others would send."""

    def __init__(self, model, loader, world):
        super().__init__(CPU, 0, world)
        with torch.no_grad():
            self.others = [
                [(model(x), y) for x, y in share(loader, Ranks(CPU, rank, world), whole=True)]
                for rank in range(1, world)
            ]

    def gather(self, value):
        return [value, *self.others]


@pytest.mark.parametrize("size", [1, 2, 7, 30, 31, 64])
def test_the_metric_is_the_same_for_any_batch_size(judged, size):
    model, load = judged
    wanted = evaluate_ranks(model, load(10), CLASSES, Ranks(CPU), show_progress=False)
    found = evaluate_ranks(model, load(size), CLASSES, Ranks(CPU), show_progress=False)
    assert (found.top1, found.top5, found.count) == (wanted.top1, wanted.top5, 31)
    assert (found.confusion == wanted.confusion).all()
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)  # a matrix product of other size rounds otherwise


@pytest.mark.parametrize("world", [2, 3, 5, 9])
def test_the_metric_is_the_same_for_any_number_of_processes(judged, world):
    """Bit for bit; nine processes have fewer than nine batches, so some have none."""
    model, load = judged
    wanted = evaluate_ranks(model, load(5), CLASSES, Ranks(CPU), show_progress=False)
    loader = load(5)
    found = evaluate_ranks(model, loader, CLASSES, Among(model, loader, world), show_progress=False)
    assert (found.top1, found.top5, found.loss, found.count) == (wanted.top1, wanted.top5, wanted.loss, 31)
    assert (found.confusion == wanted.confusion).all()


SCRIPT = """
import dataclasses, hashlib, json, sys
from pathlib import Path
import torch
from vtk.training.engine import processes
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs.joint import open_joint_run
from vtk.training.runs.pack_writer import PackWriter
from vtk.training.runs.run import open_run

torch.set_num_threads(1)
wrapped = []
wrap = processes.AccelerateRanks.wrap
processes.AccelerateRanks.wrap = lambda self, model: wrapped.append(wrap(self, model)) or wrapped[-1]
photos, out, tasks = sys.argv[1:4]
config = FinetuneConfig(
    data=None if tasks else Path(photos), out=Path(out) / "whole", tasks=tuple(tasks.split()),
    model="vit_tiny_patch16_224", model_kwargs=("depth=2", "embed_dim=32", "num_heads=2"), pretrained=False,
    img_size=32, epochs=2, batch_size=8, lr=2e-3, head_lr_mult=1.0, workers=0, device="cpu", drop_path=0.2, mixup=0.5,
)
told = {}
parts = Path(out) / "parts"
half, rest = {"out": parts, "stop_after": 1}, {"out": parts, "resume": True}
for name, changes in (("whole", {}), ("half", half), ("parts", rest)):
    with (open_joint_run if tasks else open_run)(dataclasses.replace(config, **changes), PackWriter) as run:
        run.go()
    digest = hashlib.sha256()
    for key, value in run.prepared.model.state_dict().items():
        digest.update(key.encode() + value.contiguous().numpy().tobytes())
    told[name] = digest.hexdigest()
ranks = run.prepared.ranks
kinds = [(type(m).__name__, m.find_unused_parameters, m.broadcast_buffers) for m in wrapped]
Path(out, f"rank{ranks.rank}.json").write_text(json.dumps({"hashes": told, "wrapped": kinds, "world": ranks.world}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["one task", "several tasks"])
def test_two_processes_end_with_the_same_weights_and_go_on_bit_for_bit(photos, tmp_path, vtk_home, several):
    """gloo on the CPU. Neither searches the graph for unused parameters: frozen ones are not in it to begin with."""
    tasks = f"a={photos} b={photos}@48" if several else ""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(photos), str(tmp_path), tasks],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["hashes"] == second["hashes"] and first["world"] == 2
    assert first["hashes"]["whole"] == first["hashes"]["parts"] != first["hashes"]["half"]
    kinds = [["DistributedDataParallel", False, False]] * 3
    assert first["wrapped"] == second["wrapped"] == ([] if several else kinds)
    for folder in sorted(p for p in (tmp_path / "whole").rglob("task*") if p.is_dir()):
        assert tree(folder) == tree(tmp_path / "parts" / folder.relative_to(tmp_path / "whole")), folder
