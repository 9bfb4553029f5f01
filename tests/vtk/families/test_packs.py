"""One epoch of every family, and its pack in a fresh process, byte by byte."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.vtk.families._table import FAMILIES
from vtk.training.policies import policy

RELOAD = Path(__file__).with_name("_reload.py")
QUICK = ["levit_128s"]  # the default tests take one that has BatchNorm in its attention, FFN, stem and head


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every byte."""
    one, other = one.detach().contiguous(), other.detach().contiguous()
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def check_frozen(run, family):
    """Nothing but attention, head and position has changed, and frozen BatchNorms have seen nothing."""
    model, base = run.model, run.created.base.tensors
    free = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    free = {n for n in free if family.group(n) in ("attention", "head", "position")}
    changed = {k for k, v in model.state_dict().items() if not same_bytes(v, base[k])}
    owners = [n for n, m in model.named_modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]
    live = {f"{n}.{leaf}" for n in owners for leaf in ("running_mean", "running_var", "num_batches_tracked")
            if f"{n}.weight" in free}  # fmt: skip
    alias = policy.aliases(model, policy.select(model, "attn"))
    assert changed <= free | live | alias, sorted(changed - free - live - alias)[:5]
    assert {n for n in changed if family.group(n) == "attention"}
    if family.batch_norm:
        frozen = [n for n in owners if f"{n}.weight" not in free]
        assert frozen
        assert all(model.state_dict()[f"{n}.num_batches_tracked"] == 0 for n in frozen)


def check_reloaded(runs):
    """A process of its own gives the same bytes."""
    packs = [str(run.plan.out / "task") for run in runs]
    subprocess.run([sys.executable, str(RELOAD), *packs], check=True, capture_output=True, text=True, timeout=1200)
    for run in runs:
        again = load_file(run.plan.out / "again.safetensors")
        state = run.model.state_dict()
        assert again.keys() == state.keys()
        different = [k for k in state if not same_bytes(state[k], again[k])]
        assert not different, f"{run.plan.config.model}: {different[:5]}"


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in QUICK], ids=lambda f: f.name)
def test_a_pack_with_batch_norm_is_the_trained_model(family, train):
    run = train(family)
    check_frozen(run, family)
    check_reloaded([run])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_packs_are_the_trained_models(part, train):
    runs = []
    for family in FAMILIES[part::6]:
        runs.append(train(family))
        check_frozen(runs[-1], family)
    check_reloaded(runs)
