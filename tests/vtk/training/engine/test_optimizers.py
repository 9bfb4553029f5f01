"""timm's optimisers by name: states, resume, refusals; and rates that fall from layer to layer."""

import json
import shlex
import sys

import pytest
import torch
from timm.optim import list_optimizers

from vtk.commands import _cli
from vtk.errors import UnavailableError, UsageError
from vtk.training.engine.optimizers import check_optimizer, parse_opt_kwargs, state_floats
from vtk.training.engine.param_groups import describe_rates, make_optimizer, make_schedule, parameter_groups
from vtk.training.finetune import finetune, finetune_tasks, memory_report
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.policies import policy

SOME = ["lamb", "lion", "adan", "muon"]  # kron compiles, which takes a while
FOREIGN = ("bnb", "fused")
RUNNABLE = [name for name in list_optimizers() if name != "adahessian" and not name.startswith(FOREIGN)]
ALL = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in RUNNABLE]


def attn_vit(tiny):
    model = tiny()
    policy.apply(model, policy.select(model, "attn"))
    return model


def rates(model, config):
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in parameter_groups(model, config) for p in g["params"]}


def walk(model, optimizer, schedule, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator)
        torch.manual_seed(step)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", ALL)
def test_steps_resume_exactly_and_frozen_weights_have_no_state(tiny, name, tmp_path):
    config = FinetuneConfig(optimizer=name, lr=1e-3)
    models, optimizers = [], []
    for _ in range(2):
        model = attn_vit(tiny)
        optimizer = make_optimizer(model, config)
        schedule = make_schedule(optimizer, config, 6)
        if not models:
            walk(model, optimizer, schedule, range(3))
            saved = {
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "model": model.state_dict(),
            }
            torch.save(saved, tmp_path / "state.pt")
        else:
            state = torch.load(tmp_path / "state.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
        walk(model, optimizer, schedule, range(3, 6))
        models.append(model)
        optimizers.append(optimizer)
    first, second = (m.state_dict() for m in models)
    before = tiny().state_dict()
    trained = {n for n, p in models[0].named_parameters() if p.requires_grad}
    for key in first:
        assert torch.equal(first[key], second[key]) and torch.isfinite(first[key]).all(), key
        assert torch.equal(first[key], before[key]) == (key not in trained), key
    held = {id(p) for p in optimizers[0].state}
    assert held <= {id(p) for p in models[0].parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("name", "floats"),
    [("adamw", 2), ("sgd", 1), ("lion", 1), ("adan", 4), ("lamb", 2), ("adafactor", 1 / 64 + 1 / 128)],
)
def test_state_is_counted(name, floats):
    assert state_floats(name) == pytest.approx(floats)


def test_adamw_is_torchs_and_keeps_its_fast_path(tiny):
    optimizer = make_optimizer(attn_vit(tiny), FinetuneConfig())
    assert type(optimizer) is torch.optim.AdamW
    assert all(g["foreach"] is None and g["fused"] is None for g in optimizer.param_groups)  # torch chooses


def test_refusals_in_one_line(config, monkeypatch):
    monkeypatch.setattr("vtk.training.runs.task.read_data", lambda *a, **k: pytest.fail("data was read"))
    for name, kind, text in (
        ("adahessian", UsageError, "graph of its gradients"),
        ("admw", UsageError, r"not one of timm's \d+: is it .*adamw"),
        ("schedulefree_adamw", UsageError, "not one of timm's"),
        ("lookahead_adamw", UsageError, "not one of timm's"),
    ):
        with pytest.raises(kind, match=text) as caught:
            finetune(config(optimizer=name))
        assert "\n" not in str(caught.value)
    if not torch.cuda.is_available():
        for name in ("bnbadam8bit", "fusedadam"):
            with pytest.raises(UnavailableError, match=f"--optimizer` {name} needs .* CUDA device"):
                check_optimizer(name)


def test_opt_kwargs_reach_the_optimiser(tiny):
    config = FinetuneConfig(opt_kwargs=("eps=1e-5", "betas=[0.8,0.95]"))
    groups = make_optimizer(attn_vit(tiny), config).param_groups
    assert all(g["eps"] == 1e-5 and list(g["betas"]) == [0.8, 0.95] for g in groups)
    for words, text in (
        (("eps",), "write key=value"),
        (("lr=1",), "lr: this is set by --lr"),
        (("nonsense=1",), "adamw does not take that .*; it takes betas, eps"),
    ):
        with pytest.raises(UsageError, match=text):
            check_optimizer("adamw", words)
    assert parse_opt_kwargs(["nesterov=false", "eps=1e-8"]) == {"nesterov": False, "eps": 1e-8}
    assert parse_opt_kwargs(["betas=[9e-1,0.5]"]) == {"betas": [0.9, 0.5]}
    with pytest.raises(UsageError, match="eps: given twice"):
        parse_opt_kwargs(["eps=1e-8", "eps=1e-6"])


def test_layer_decay_counts_layers_from_the_last(tiny):
    model = tiny(depth=3)
    policy.apply(model, policy.select(model, "full"))
    found = rates(model, FinetuneConfig(lr=1.0, layer_decay=0.5, head_lr_mult=10.0, weight_decay=0.1))
    # the last layer is the head; the final norm is of the last block, and what is before the first block is the lowest
    scale = {"norm": 0.5, "head": 10.0, "blocks.2": 0.5, "blocks.1": 0.25, "blocks.0": 0.125, "patch_embed": 0.0625}
    plain = rates(model, FinetuneConfig(lr=1.0, head_lr_mult=10.0, weight_decay=0.1))
    for name, (lr, decay) in found.items():
        layer = next((s for key, s in scale.items() if name.startswith(key + ".")), 0.0625)
        assert lr == pytest.approx(layer), name
        assert decay == plain[name][1], name
    assert rates(model, FinetuneConfig(lr=1.0, layer_decay=1.0)) == rates(model, FinetuneConfig(lr=1.0))


def test_layer_decay_does_not_depend_on_what_is_trained(tiny):
    full, attn = tiny(depth=3), tiny(depth=3)
    policy.apply(attn, policy.select(attn, "attn"))
    config = FinetuneConfig(lr=1.0, layer_decay=0.5)
    whole = rates(full, config)
    part = rates(attn, config)
    assert part == {name: whole[name] for name in part} and len({lr for lr, _ in part.values()}) == 5
    assert describe_rates(attn, config) == (
        "adamw, learning rate up to 0.5 in the last layer to 0.0625 in the first trained, 10 in the head"
    )


def test_a_run_with_all_of_it_resumes_exactly(config, tmp_path, capsys):
    changes = {
        "batch_size": 18,
        "epochs": 4,
        "optimizer": "lion",
        "layer_decay": 0.7,
        "opt_kwargs": ("betas=[0.9,0.98]",),
        "lr": 3e-4,
    }
    whole = finetune(config(out=tmp_path / "whole", **changes))
    assert "lion, learning rate up to" in capsys.readouterr().out
    finetune(config(out=tmp_path / "parts", stop_after=1, **changes))
    with pytest.raises(UsageError, match=r"--layer-decay None \(was 0.7\), --optimizer adamw \(was lion\)"):
        finetune(config(out=tmp_path / "parts", resume=True, **{**changes, "optimizer": "adamw", "layer_decay": None}))
    parts = finetune(config(out=tmp_path / "parts", resume=True, **changes))
    for name in ("task/task.safetensors", "task-last/task.safetensors", "task/task.json"):
        assert (whole.out / name).read_bytes() == (parts.out / name).read_bytes(), name
    words = shlex.split(json.loads((whole.task / "task.json").read_text())["command"])
    told = _cli.parse(FinetuneConfig, words[2:], prog="vtk finetune", description="", positional=("data",))
    assert {key: getattr(told, key) for key in changes} == changes


@pytest.mark.slow
def test_several_tasks_and_a_dry_run(config, photos, tmp_path):
    changes = {"data": None, "tasks": (f"a={photos}", f"b={photos}"), "optimizer": "lamb", "layer_decay": 0.8}
    result = finetune_tasks(config(epochs=1, **changes))
    assert set(result.tasks) == {"a", "b"}
    one, two = (
        memory_report(config(optimizer=name, dry_run=True, out=tmp_path / name)).counted[0].optimizer
        for name in ("lion", "adamw")
    )
    assert 2 * one == two


@pytest.mark.parametrize(
    ("values", "text"),
    [({"layer_decay": 0.0}, "--layer-decay` is 0.0"), ({"layer_decay": 1.5}, "--layer-decay` is 1.5")],
)
def test_bad_values_are_refused(values, text):
    with pytest.raises(UsageError, match=text):
        FinetuneConfig(**values)


def test_the_command_lists_no_optimiser_and_needs_no_torch_for_it():
    assert "timm" not in vars(sys.modules["vtk.training.options.recipe"])
