"""Parameter groups and the schedule, against formulas written out here."""

import math

import numpy as np
import pytest
import torch

from vtk.training.engine.param_groups import (
    WeightDecay,
    describe_rates,
    lr_factor,
    make_optimizer,
    make_schedule,
    parameter_groups,
)
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.policies import policy
from vtk.training.pretrain.config import PretrainConfig


def groups_by_name(model, config):
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in parameter_groups(model, config) for p in g["params"]}


def test_decay_and_rate_of_every_tensor(tiny):
    model = tiny()
    policy.apply(model, policy.select(model, "attn"))
    found = groups_by_name(model, FinetuneConfig(lr=1e-3, head_lr_mult=10, weight_decay=0.05))
    expected = {"pos_embed": (1e-3, 0.0), "head.weight": (1e-2, 0.05), "head.bias": (1e-2, 0.0)}
    for block in range(2):
        for leaf in ("qkv", "proj"):
            expected[f"blocks.{block}.attn.{leaf}.weight"] = (1e-3, 0.05)
            expected[f"blocks.{block}.attn.{leaf}.bias"] = (1e-3, 0.0)
    assert found == expected


def test_norms_and_tokens_do_not_decay(tiny):
    model = tiny(class_token=True, reg_tokens=2, init_values=0.1)
    policy.apply(model, policy.select(model, "full"))
    found = groups_by_name(model, FinetuneConfig())
    matrices = {n for n, p in model.named_parameters() if p.ndim > 1}
    decayed = {n for n, (_, decay) in found.items() if decay}
    assert found.keys() == dict(model.named_parameters()).keys()
    assert decayed == matrices - {"pos_embed", "cls_token"} - set(model.no_weight_decay())


def test_sgd_has_nesterov_momentum(tiny):
    model = tiny()
    policy.apply(model, policy.select(model, "head"))
    optimizer = make_optimizer(model, FinetuneConfig(optimizer="sgd", momentum=0.8, lr=0.1))
    assert isinstance(optimizer, torch.optim.SGD)
    assert all(g["nesterov"] and g["momentum"] == 0.8 for g in optimizer.param_groups)
    plain = make_optimizer(model, FinetuneConfig(optimizer="sgd", momentum=0.0, lr=0.1))
    assert not any(g["nesterov"] or g["momentum"] for g in plain.param_groups)


def test_schedule_is_the_formula_for_every_step(tiny):
    model = tiny()
    policy.apply(model, policy.select(model, "attn"))
    config = FinetuneConfig(lr=1e-3, head_lr_mult=4, warmup=0.2, min_lr=0.1)
    optimizer = make_optimizer(model, config)
    schedule = make_schedule(optimizer, config, 20)
    for step in range(20):
        factor = (step + 1) / 4 if step < 4 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 16)) / 2
        rates = sorted({g["lr"] for g in optimizer.param_groups})
        assert rates == pytest.approx([1e-3 * factor, 4e-3 * factor], rel=1e-12)
        optimizer.step()
        schedule.step()


def test_no_step_is_wasted():
    assert lr_factor(0, 100, 0.1, 0.0) > 0 and lr_factor(99, 100, 0.1, 0.0) > 0
    assert lr_factor(9, 100, 0.1, 0.0) == lr_factor(10, 100, 0.1, 0.0) == 1
    assert lr_factor(0, 1, 0.0, 0.0) == 1


@pytest.mark.parametrize(("start", "end"), [(0.0, 0.4), (0.04, 0.4), (0.4, 0.0)])
def test_weight_decay_changes_as_in_dinos_code_also_from_0(tiny, start, end):
    """``cosine_scheduler(weight_decay, weight_decay_end, …)`` of Caron et al. 2021, for what decays."""
    model, steps = tiny(), 8
    config = PretrainConfig(method="dino", weight_decay=start, weight_decay_end=end)
    optimizer = make_optimizer(model, config)
    decay = WeightDecay(optimizer, config, steps)
    names = {id(p): n for n, p in model.named_parameters()}
    schedule = end + 0.5 * (start - end) * (1 + np.cos(np.pi * np.arange(steps) / steps))
    for step in range(steps):
        decay.set_at(step)
        found = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
        assert found["blocks.0.mlp.fc1.weight"] == pytest.approx(schedule[step], abs=1e-15)
        assert found["blocks.0.mlp.fc1.bias"] == found["norm.weight"] == found["pos_embed"] == 0
    line = describe_rates(model, config)
    assert f"weight decay from {start:g} to {end:g}" in line
    assert "weight decay" not in describe_rates(model, FinetuneConfig())
