"""The average of trained weights, against a loop in fp64, and what a run makes of it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from vtk.errors import DataError, UsageError
from vtk.packs.load import load_task
from vtk.training.engine.ema import Ema, decay_at
from vtk.training.engine.fitting import fit
from vtk.training.engine.precision import Bf16, Fp32
from vtk.training.engine.processes import Ranks
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.memory import Subject, choose_memory
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy


@pytest.fixture
def config(config):
    """Runs of one block and three steps an epoch."""
    small = {"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), "batch_size": 12}
    return lambda **changes: config(**{**small, **changes})


class Noted:
    """A stream of fixed batches; a loss that writes down the head's weights before each step."""

    sizes = (4, 4, 4)

    def epoch(self, index):
        generator = torch.Generator().manual_seed(index)
        for n in self.sizes:
            yield Batch(torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 3)


class Watch(Classification):
    def __init__(self):
        super().__init__(3)
        self.seen = []

    def loss(self, model, batch):
        self.seen.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
        return super().loss(model, batch)


def trained(tiny, kind="attn"):
    model = tiny()
    policy.apply(model, policy.select(model, kind))
    return model


def test_the_first_updates_follow_the_weights_closely():
    assert [decay_at(t, 0.9) for t in (1, 2, 80)] == [2 / 11, 3 / 12, 81 / 90]
    assert decay_at(10**6, 0.999) == 0.999


@pytest.mark.parametrize("regime", [Fp32, Bf16])
def test_equals_a_loop_in_fp64_and_is_what_is_left_in_the_model(tiny, regime):
    model, watch, ends = trained(tiny), Watch(), []
    first = {n: p.detach().clone() for n, p in model.named_parameters()}

    def on_epoch(end):
        raw = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        with end.averaged():
            ends.append(({n: p.detach().clone() for n, p in model.named_parameters()}, raw))
        assert all(torch.equal(p, raw[n]) for n, p in model.named_parameters() if p.requires_grad)
        return {}

    config = FinetuneConfig(epochs=3, lr=1e-2, ema=0.9)
    fit(model, watch, [Noted()], config, regime(), on_epoch=on_epoch, show_progress=False)
    average = {n: p.double() for n, p in watch.seen[0].items()}
    after = [*watch.seen[1:], ends[-1][1]]
    for step, weights in enumerate(after, 1):
        d = min(0.9, (1 + step) / (10 + step))
        average = {n: d * average[n] + (1 - d) * weights[n].double() for n in average}
        if step % 3 == 0:
            found = ends[step // 3 - 1][0]
            assert all(torch.allclose(found[n].double(), average[n], atol=1e-6) for n in average)
    left = dict(model.named_parameters())
    assert all(torch.equal(left[n], ends[-1][0][n]) for n in left)
    assert all(torch.equal(left[n], first[n].to(left[n].dtype)) for n in left.keys() - average.keys())


def test_training_itself_is_not_changed(tiny):
    raw = []
    for ema in (None, 0.99):
        model = trained(tiny)
        config = FinetuneConfig(epochs=2, lr=1e-2, ema=ema)

        def on_epoch(end, head=model.head):
            raw.append(head.weight.detach().clone())
            return {}

        fit(model, Classification(3), [Noted()], config, Fp32(), on_epoch=on_epoch, show_progress=False)
    assert torch.equal(raw[0], raw[2]) and torch.equal(raw[1], raw[3])


def test_frozen_weights_have_no_average_and_memory_counts_it(tiny):
    model = trained(tiny)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    average = Ema(parameters, 0.9)
    assert sum(t.numel() for t in average.averages.values()) == sum(p.numel() for p in parameters.values())

    def optimizer(ema):
        choice = choose_memory(
            [Subject(model, (3, 32, 32))], FinetuneConfig(ema=ema), "fp32", Ranks(torch.device("cpu")), images=8,
            count_all=True,
        )  # fmt: skip
        return choice.counted[0].optimizer

    assert optimizer(0.9) - optimizer(None) == 4 * sum(p.numel() for p in parameters.values())


def test_running_statistics_are_averaged_too(tiny):
    model = tiny()
    model.patch_embed.norm = torch.nn.BatchNorm1d(4)
    policy.apply(model, policy.select(model, "full"))
    means = []

    def on_epoch(end):
        raw = model.patch_embed.norm.running_mean.clone()
        with end.averaged():
            means.append((raw, model.patch_embed.norm.running_mean.clone()))
        return {}

    fit(
        model, Classification(3), [Noted()], FinetuneConfig(epochs=1, ema=0.5), Fp32(), on_epoch=on_epoch,
        show_progress=False,
    )  # fmt: skip
    assert not torch.equal(*means[0]) and torch.equal(model.patch_embed.norm.running_mean, means[0][1])


def test_the_pack_is_the_average_and_gives_the_runs_metric(config, photos, tmp_path):
    # of three epochs: a run that is complete keeps its packs only
    result = finetune(config(ema=0.9, out=tmp_path / "ema", epochs=3, stop_after=2))
    plain = finetune(config(out=tmp_path / "plain", epochs=3, stop_after=2))
    packed, raw = load_file(result.task_last / "task.safetensors"), load_file(result.out / "last/model.safetensors")
    other = load_file(plain.task_last / "task.safetensors")
    assert packed.keys() == raw.keys() == other.keys()
    assert all(torch.equal(raw[n], other[n]) for n in raw)  # the same training
    assert not any(torch.equal(raw[n], packed[n]) for n in raw)
    from vtk.data.loading.eval_pipeline import eval_transform
    from vtk.data.loading.loader import make_loader
    from vtk.evaluation import evaluate

    task = load_task(result.task)
    loader = make_loader(
        result_samples(photos), eval_transform(task.card.input), batch_size=64, shuffle=False, seed=0, workers=0
    )
    found = evaluate(task.model, loader, task.card.classes, show_progress=False)
    card = json.loads((result.task / "task.json").read_text())
    assert card["metrics"]["loss"] == pytest.approx(found.loss, abs=1e-12) and "--ema 0.9" in card["command"]


def result_samples(photos):
    from vtk.data import scan

    return scan(photos, show_progress=False).val


def test_two_and_two_epochs_equal_four(config, tmp_path):
    changes = {"epochs": 4, "ema": 0.9, "precision": "bf16"}
    whole = finetune(config(out=tmp_path / "whole", **changes))
    finetune(config(out=tmp_path / "parts", stop_after=2, **changes))
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "parts", copy)
    parts = finetune(config(out=tmp_path / "parts", resume=True, **changes))
    for name in ("task/task.safetensors", "task-last/task.safetensors"):
        assert (whole.out / name).read_bytes() == (parts.out / name).read_bytes(), name
    again = finetune(config(out=tmp_path / "parts", resume=True, **changes))  # nothing is left to train
    assert (whole.task_last / "task.safetensors").read_bytes() == (again.task_last / "task.safetensors").read_bytes()
    state = torch.load(copy / "last" / "state.pt", weights_only=True)
    state.pop("ema")
    torch.save(state, copy / "last" / "state.pt")
    with pytest.raises(DataError, match="no average of these weights"):
        finetune(config(out=copy, resume=True, **changes))
    with pytest.raises(UsageError, match=r"--ema 0.5 \(was 0.9\)"):
        finetune(config(out=copy, resume=True, **{**changes, "ema": 0.5}))


@pytest.mark.slow
def test_each_task_has_its_own_average(config, photos, tmp_path):
    changes = {"data": None, "tasks": (f"a={photos}", f"b={photos}"), "ema": 0.9, "epochs": 2}
    whole = finetune_tasks(config(out=tmp_path / "whole", **changes))
    finetune_tasks(config(out=tmp_path / "parts", stop_after=1, **changes))
    parts = finetune_tasks(config(out=tmp_path / "parts", resume=True, **changes))
    alone = load_file(finetune(config(out=tmp_path / "alone", ema=0.9)).task_last / "task.safetensors")
    for name in ("a", "b"):
        own = [load_file(run.tasks[name].task_last / "task.safetensors") for run in (whole, parts)]
        assert all(torch.equal(own[0][n], own[1][n]) for n in own[0])
        assert all(torch.allclose(own[0][n], alone[n], atol=2e-4) for n in alone)
