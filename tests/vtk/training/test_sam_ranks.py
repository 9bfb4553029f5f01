"""Sharpness-aware steps of two processes (gloo): who climbs by whose images, and that all end with the same weights."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.vtk.training._two_pass import Fixed, Net, clip, two_pass

REPO = Path(__file__).resolve().parents[3]
STEPS = [[6, 6], [6, 6], [4]]

SCRIPT = """
import sys
import torch
from tests.vtk.training._two_pass import Fixed, Net
from vtk.card import InputSpec
from vtk.training.step_rules.adversarial import Adversary
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.engine.fitting import fit
from vtk.training.engine.loss_scale import DynamicScaler
from vtk.training.objectives.base import Batch, Classification
from vtk.training.engine.processes import open_ranks
from vtk.training.engine.precision import Fp32
from vtk.training.step_rules.sam import Ascent

torch.set_num_threads(1)
ranks = open_ranks("cpu")

class Shared(Fixed):
    def epoch(self, index):
        for images, labels in self.batches:
            yield Batch(images[ranks.rank :: 2].clone(), labels[ranks.rank :: 2].clone())

def spoil(net):
    calls = []
    def hook(grad):
        calls.append(1)
        return torch.full_like(grad, float("inf")) if ranks.rank == 1 and len(calls) == 1 else grad
    net.first.weight.register_hook(hook)

CASES = {
    "each": (Ascent(0.3), {}),
    "adaptive": (Ascent(0.5, adaptive=True), {}),
    "groups": (Ascent(0.3, most=2), {}),
    "together": (Ascent(0.3, together=True), {}),
    "spoilt": (Ascent(0.3), {}),
    "spoilt, scaled": (Ascent(0.3), {}),
    "adversarial": (Ascent(0.3, adversary=Adversary(8, [InputSpec(4, 4)])), {}),
}
found = {}
for name, (rule, flags) in CASES.items():
    net = Net(0.0, norm=False)
    if "spoilt" in name:
        spoil(net)
    scaler = DynamicScaler("cpu", 1024.0) if "scaled" in name else None
    config = FinetuneConfig(epochs=1, accumulate=2, lr=0.03, head_lr_mult=1.0, weight_decay=0.0, warmup=0.0, min_lr=1.0,
                            clip_grad=0.5)
    result = fit(net, Classification(3), [Shared(6, 6, 6, 6, 4)], config, Fp32(scaler), ranks=ranks, step_rule=rule,
                 show_progress=False)
    found[name] = ({n: t.clone() for n, t in net.state_dict().items()}, result.rows[0])
torch.save(found, f"{sys.argv[1]}/{ranks.rank}.pt")
"""


def rank_groups(step, most=None):
    """What each of two processes has of a step's batches: every second image, in groups."""
    own = [[(x[r::2], y[r::2]) for x, y in step] for r in range(2)]
    if most is None:
        return own
    return [[(x[a : a + most], y[a : a + most])] for half in own for x, y in half for a in cuts(len(y), most)]


def cuts(images, most):
    # three images in groups of at most two are two and one
    assert images in (2, 3) and most == 2
    return range(0, images, most)


def by_hand(groups_of, skip=0, adaptive=False, rho=0.3):
    net, stream, losses = Net(0.0, norm=False).train(), Fixed(6, 6, 6, 6, 4), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.03, weight_decay=0.0)
    for first in range(0, 5, 2)[skip:]:
        step = stream.batches[first : first + 2]
        count = sum(len(y) for _, y in step)
        gradients, both = two_pass(net, groups_of(step), count, rho, adaptive)
        for name, gradient in clip(gradients, 0.5).items():
            dict(net.named_parameters())[name].grad = gradient
        optimizer.step()
        losses.append((*both, count))
    return net.state_dict(), losses


@pytest.mark.slow
def test_two_processes_against_steps_written_by_hand(tmp_path):
    (tmp_path / "rank.py").write_text(SCRIPT)
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc_per_node", "2", str(tmp_path / "rank.py"), str(tmp_path)]
    path = os.pathsep.join([str(REPO / p) for p in (".", "kernels", "export")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    wanted = {
        "each": by_hand(rank_groups),
        "adaptive": by_hand(rank_groups, adaptive=True, rho=0.5),
        "groups": by_hand(lambda step: rank_groups(step, 2)),
        "together": by_hand(lambda step: [step]),
        # one process's first gradient of the first step is infinite: both leave the step out
        "spoilt": by_hand(rank_groups, skip=1),
        "spoilt, scaled": by_hand(rank_groups, skip=1),
    }
    for name, (weights, row) in first.items():
        assert all(torch.equal(weights[n], second[name][0][n]) for n in weights), name
        assert row["perturbed_loss"] == second[name][1]["perturbed_loss"]
        if name in wanted:
            tensors, losses = wanted[name]
            torch.testing.assert_close(weights, tensors, rtol=0, atol=1e-12, msg=name)
            images = sum(n for *_, n in losses)
            assert row["perturbed_loss"] == pytest.approx(sum(b * n for _, b, n in losses) / images, rel=1e-5), name
    assert first["spoilt, scaled"][1]["skipped_steps"] == 1
    each, together = (first[name][0]["first.weight"] for name in ("each", "together"))
    assert float((each - together).abs().max()) > 1e-6  # otherwise nothing above would tell them apart
