"""The loss scaler: what a power of two may not change, what an overflow may not touch, and when a run gives up."""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vtk.training.engine.fitting import DivergedError, fit
from vtk.training.engine.loss_scale import DynamicScaler, NoScaler
from vtk.training.engine.precision import Fp16, Fp32
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy

REPO = Path(__file__).resolve().parents[4]


class Fixed:
    """The same batches in every epoch."""

    def __init__(self, *sizes: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.sizes = sizes
        self.batches = [(torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 3) for n in sizes]

    def epoch(self, index):
        for images, labels in self.batches:
            yield Batch(images.clone(), labels.clone())


class Twice:
    """A rule that asks for gradients twice, as SAM does, and keeps those of the first time."""

    passes = 2

    def __init__(self, model):
        self.model, self.seen = model, []

    def step(self, gradients, update):
        gradients()
        self.seen.append([p.grad.clone() for p in self.model.parameters() if p.requires_grad])
        loss = gradients()
        update()
        return loss


def vit(tiny):
    model = tiny()
    policy.apply(model, policy.select(model, "attn"))
    return model


def run(model, scaler, *, stream=None, rule=None, precision=None, start=None, **changes):
    config = FinetuneConfig(**{"epochs": 2, "lr": 1e-3, "accumulate": 2, **changes})
    states = []

    def keep(end):
        states.append(copy.deepcopy(end.state({})))
        return {}

    result = fit(
        model, Classification(3, smoothing=0.1), [stream or Fixed(4, 4, 3)], config, precision or Fp32(scaler),
        step_rule=rule, start=start, on_epoch=keep, show_progress=False,
    )  # fmt: skip
    return result, states


def bytes_of(model):
    return {n: t.clone() for n, t in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("factor", [2.0**-3, 2.0**10])
def test_a_power_of_two_changes_no_bit_of_the_update(tiny, factor):
    plain, scaled = vit(tiny), vit(tiny)
    told, states = run(plain, NoScaler())
    # accumulation, clipping and AdamW all see divided gradients
    told_scaled, scaled_states = run(scaled, DynamicScaler("cpu", factor, growth_interval=3))
    assert same(bytes_of(plain), bytes_of(scaled))
    drop = ("seconds", "images_per_second", "skipped_steps")
    rows = [[{k: v for k, v in r.items() if k not in drop} for r in x.rows] for x in (told, told_scaled)]
    assert rows[0] == rows[1]
    moments = [s[-1].optimizer["state"] for s in (states, scaled_states)]
    assert all(torch.equal(moments[0][i]["exp_avg_sq"], moments[1][i]["exp_avg_sq"]) for i in moments[0])
    assert scaled_states[-1].scaler["scale"] == factor * 2  # four steps, doubled after three
    assert [r["skipped_steps"] for r in told_scaled.rows] == [0, 0] and "skipped_steps" not in told.rows[0]


def overflow(model, at):
    """Make the gradient of one weight infinite in the backward passes numbered in ``at``."""
    calls = []

    def spoil(grad):
        calls.append(1)
        return torch.full_like(grad, float("inf")) if len(calls) in at else grad

    dict(model.named_parameters())["blocks.0.attn.qkv.weight"].register_hook(spoil)


def test_an_overflow_leaves_the_step_out_and_halves_the_factor(tiny):
    model = vit(tiny)
    before = bytes_of(model)
    overflow(model, {1})
    result, (state,) = run(model, DynamicScaler("cpu", 1024.0), stream=Fixed(4, 4), epochs=1)  # one step in all
    assert same(bytes_of(model), before)
    assert state.optimizer["state"] == {}  # AdamW was never called
    assert state.scaler["scale"] == 512.0 and result.rows[0]["skipped_steps"] == 1
    assert state.schedule["last_epoch"] == 0  # the learning rate waits, too


def test_steps_after_an_overflow_are_those_of_a_run_without_it(tiny):
    stream = Fixed(4, 4)
    once, twice = vit(tiny), vit(tiny)
    overflow(twice, {2})  # the second backward pass of the first step
    _, (calm,) = run(once, NoScaler(), stream=stream, epochs=1, warmup=0.0, min_lr=1.0)
    result, states = run(twice, DynamicScaler("cpu"), stream=stream, epochs=2, warmup=0.0, min_lr=1.0)
    assert same(bytes_of(once), bytes_of(twice))
    assert states[-1].schedule["last_epoch"] == calm.schedule["last_epoch"] == 1
    assert [row["skipped_steps"] for row in result.rows] == [1, 0]


def test_gradients_may_be_asked_for_twice(tiny):
    plain, scaled, spoilt = vit(tiny), vit(tiny), vit(tiny)
    rules = [Twice(plain), Twice(scaled), Twice(spoilt)]
    run(plain, NoScaler(), rule=rules[0])
    run(scaled, DynamicScaler("cpu", 256.0), rule=rules[1])
    assert same(bytes_of(plain), bytes_of(scaled))
    for a, b in zip(rules[0].seen, rules[1].seen, strict=True):  # the rule sees them divided
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    before = bytes_of(spoilt)
    overflow(spoilt, {1})  # the first time only: what was added to the weights for the second is worthless
    result, (state,) = run(
        spoilt, DynamicScaler("cpu", 256.0), rule=rules[2], stream=Fixed(4, 4), epochs=1, accumulate=2
    )
    assert same(bytes_of(spoilt), before)
    assert result.rows[0]["skipped_steps"] == 1 and state.scaler["scale"] == 128.0


def test_a_resumed_run_goes_on_with_the_factor(tiny):
    whole = vit(tiny)
    overflow(whole, {2, 5})
    result, states = run(whole, DynamicScaler("cpu", 64.0, growth_interval=3), epochs=4)
    part = vit(tiny)
    overflow(part, {2, 5})
    _, (first, _) = run(part, DynamicScaler("cpu", 64.0, growth_interval=3), epochs=4, stop_after=2)
    assert first.scaler["scale"] == 32.0
    _, (_, last) = run(part, DynamicScaler("cpu"), epochs=4, start=states[1])
    assert last.scaler == states[-1].scaler and states[1].scaler["scale"] == 16.0
    assert same(bytes_of(part), bytes_of(whole)) and [r["skipped_steps"] for r in result.rows] == [1, 1, 0, 0]


def test_a_loss_that_is_not_a_number_is_not_skipped_for_ever(tiny):
    model, stream = vit(tiny), Fixed(4, 4)
    stream.batches[0][0][0, 0, 0, 0] = float("nan")
    with pytest.raises(DivergedError, match="the loss is nan after step 1 of epoch 1"):
        run(model, DynamicScaler("cpu"), stream=stream, epochs=1)


def test_gradients_that_never_are_finite_end_the_run(tiny):
    model = vit(tiny)
    overflow(model, set(range(1000)))
    with pytest.raises(DivergedError, match=r"not finite in epoch 3, even with a loss that is not multiplied") as told:
        run(model, DynamicScaler("cpu", 16.0), epochs=9)  # 16, 8, 4, 2, 1: five steps of two an epoch
    assert "\n" not in str(told.value)


def test_small_gradients_live_by_the_factor_alone(tiny):
    # activations' gradients below 6e-8 are nothing in fp16
    def largest(scaler):
        model = vit(tiny)
        precision = Fp16(scaler)
        precision.prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
        model.train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
        scaler.scale(model(torch.ones(2, 3, 32, 32)).float()[:, 0].sum() * 2.0**-26).backward()
        precision.after_backward(optimizer)
        return float(dict(model.named_parameters())["blocks.0.attn.qkv.weight"].grad.abs().max())

    assert largest(NoScaler()) == 0.0
    assert 0.0 < largest(DynamicScaler("cpu")) < 1e-6


def test_a_step_needs_divided_gradients(tiny):
    optimizer = torch.optim.SGD(tiny().parameters())
    with pytest.raises(ValueError, match="without unscale"):
        DynamicScaler("cpu").step(optimizer)


RANK = """
import sys
import torch
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.engine.fitting import fit
from vtk.training.engine.loss_scale import DynamicScaler
from vtk.training.objectives.base import Batch, Classification
from vtk.training.engine.processes import open_ranks
from vtk.training.engine.precision import Fp32

class Stream:
    sizes = (8, 8, 8)
    def epoch(self, index):
        for i in range(3):
            yield Batch(torch.ones(4, 6) * (i + rank), torch.arange(4) % 3)

ranks = open_ranks("cpu")
rank = ranks.rank
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
calls = []
def spoil(grad):
    calls.append(1)
    return torch.full_like(grad, float("inf")) if rank == 1 and len(calls) == 2 else grad
model.weight.register_hook(spoil)
scaler = DynamicScaler("cpu", 1024.0)
result = fit(model, Classification(3), [Stream()], FinetuneConfig(epochs=1, lr=0.1, warmup=0.0), Fp32(scaler),
             ranks=ranks, show_progress=False)
torch.save([model.state_dict(), result.rows[0]["skipped_steps"], scaler.factor], f"{sys.argv[1]}/{rank}.pt")
"""


@pytest.mark.slow
def test_all_processes_leave_out_a_step_alike(tmp_path):
    """An overflow in one of two processes, as torchrun and gloo see it."""
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc_per_node", "2", str(tmp_path / "rank.py"), str(tmp_path)]
    path = os.pathsep.join([str(REPO / p) for p in (".", "kernels", "export")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (first, *a), (second, *b) = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert a == b == [1.0, 512.0]
    assert all(torch.equal(first[n], second[n]) and bool(first[n].isfinite().all()) for n in first)
