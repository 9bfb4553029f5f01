"""DINO's loss, centre, teacher and steps, against the paper's pseudo-code written out in fp64."""

import math
import types

import numpy as np
import pytest
import torch
from torch import nn

from vtk.errors import DataError
from vtk.training.engine.fitting import fit
from vtk.training.engine.learner import Learner
from vtk.training.engine.loss_scale import NoScaler
from vtk.training.engine.precision import Fp32
from vtk.training.engine.processes import Ranks
from vtk.training.objectives.base import Batch
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.dino.loss import Schedules, dino_loss
from vtk.training.pretrain.dino.method import FrozenPrototypes, SelfDistillation
from vtk.training.pretrain.dino.model import DinoHead, DinoModel
from vtk.training.pretrain.dino.views import Crops

CROPS = Crops(1, (4, 4), (2, 2), 2)
NUMBERS = 2 * 16 + 2 * 4
EPOCHS, SIZES = 5, (4, 3)
FLAGS = {
    "method": "dino", "epochs": EPOCHS, "optimizer": "sgd", "momentum": 0.5, "lr": 0.3, "warmup": 0.0, "clip_grad": 0.0,
    "weight_decay": 0.1, "weight_decay_end": 0.5, "teacher_momentum": 0.8, "teacher_temp": 0.09,
    "teacher_temp_start": 0.05, "teacher_temp_epochs": 3, "student_temp": 0.2, "center_momentum": 0.7,
    "freeze_prototypes": 2, "dino_prototypes": 6, "dino_hidden": 7, "dino_bottleneck": 3, "local_crops": 2,
}  # fmt: skip


class Means(nn.Module):
    """Takes images of any size: the means of their quarters, then a linear layer."""

    num_features = 5

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)

    def forward(self, images):
        return self.fc(nn.functional.adaptive_avg_pool2d(images, 2).flatten(1))


class Fixed:
    """Packed views of random numbers, the same in every epoch."""

    sizes = SIZES

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.batches = [torch.randn(n, NUMBERS, generator=generator, dtype=torch.float64) for n in SIZES]

    def epoch(self, index):
        for rows in self.batches:
            yield Batch(rows.clone(), torch.zeros(len(rows), dtype=torch.int64))


def made(**changes):
    torch.manual_seed(1)
    config = PretrainConfig(**{**FLAGS, **changes}).resolved()
    model = DinoModel(Means(), DinoHead(5, 7, 3, 6, unit=config.unit_prototypes), CROPS).double()
    for layer in model.projection.mlp:  # 0.02 would leave little to see
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
    objective = SelfDistillation(types.SimpleNamespace(config=config, ranks=Ranks(torch.device("cpu"))))
    return model, objective, config


def run(**changes):
    model, objective, config = made(**changes)
    rule = FrozenPrototypes(objective, model.projection.prototypes)
    student = {}

    def last(end):  # before the teacher takes the student's place for good
        student.update({n: p.detach().clone() for n, p in model.named_parameters()})
        return {}

    result = fit(model, objective, [Fixed()], config, Fp32(), step_rule=rule, on_epoch=last, show_progress=False)
    return model, objective.teacher, student, result


def quarters(view, side):
    half = side // 2
    image = view.reshape(side, side)
    return torch.stack([image[a : a + half, b : b + half].mean() for a in (0, half) for b in (0, half)])


def outputs_by_hand(p, rows, views):
    """(views, B, K): the backbone, three layers with GELU, the unit sphere, and cosines with the prototypes."""
    found = []
    for v in range(views):
        each = []
        for row in rows:
            part, side = (row[16 * v : 16 * v + 16], 4) if v < 2 else (row[32 + 4 * (v - 2) : 36 + 4 * (v - 2)], 2)
            x = p["backbone.fc.weight"] @ quarters(part, side) + p["backbone.fc.bias"]
            for i in (0, 2, 4):
                x = p[f"projection.mlp.{i}.weight"] @ x + p[f"projection.mlp.{i}.bias"]
                x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2))) if i < 4 else x
            w = p["projection.prototypes.weight"]
            each.append((w / w.square().sum(1, keepdim=True).sqrt()) @ (x / x.square().sum().sqrt()))
        found.append(torch.stack(each))
    return torch.stack(found)


def loss_by_hand(student, teacher, center, student_temp, teacher_temp):
    """The pseudo-code of Caron et al. 2021, pair of views by pair."""
    total, pairs = 0.0, 0
    for g in range(len(teacher)):
        q = ((teacher[g] - center) / teacher_temp).exp()
        q = q / q.sum(1, keepdim=True)
        for v in range(len(student)):
            if v != g:
                e = (student[v] / student_temp).exp()
                total = total - (q * (e / e.sum(1, keepdim=True)).log()).sum(1).mean()
                pairs += 1
    return total / pairs


def by_hand(start, together):
    """All steps: Nesterov SGD, falling learning rate, rising decay, the teacher, its centre and temperature."""
    student = {n: p.clone().requires_grad_() for n, p in start.items() if n != "projection.prototypes.length"}
    teacher = {n: p.detach().clone() for n, p in student.items()}
    center, buffers = torch.zeros(6, dtype=torch.float64), {}
    groups = [Fixed().batches] if together else [[rows] for rows in Fixed().batches]
    total = EPOCHS * len(groups)
    half = [0.5 * (1 + math.cos(math.pi * t / total)) for t in range(total)]
    for t in range(total):
        epoch = t // len(groups)
        rows = torch.cat(groups[t % len(groups)])
        temp = np.concatenate([np.linspace(0.05, 0.09, 3), np.full(EPOCHS - 3, 0.09)])[epoch]
        targets = outputs_by_hand(teacher, rows, 2).detach()
        loss = loss_by_hand(outputs_by_hand(student, rows, 4), targets, center, 0.2, temp)
        gradients = dict(zip(student, torch.autograd.grad(loss, student.values()), strict=True))
        decay, keep = 0.5 - 0.4 * half[t], 1 - 0.2 * half[t]
        with torch.no_grad():
            for name, p in student.items():
                if "prototypes" in name and epoch < 2:
                    continue
                g = gradients[name] + (decay * p if p.ndim > 1 else 0)
                buffers[name] = 0.5 * buffers[name] + g if name in buffers else g
                p -= 0.3 * half[t] * (g + 0.5 * buffers[name])
            for name, p in teacher.items():
                p.copy_(keep * p + (1 - keep) * student[name])
        center = 0.7 * center + 0.3 * targets.mean((0, 1))
    return student, teacher, center, float(loss.detach())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_the_papers_pseudo_code(accumulate):
    start = {n: p.detach().clone() for n, p in made()[0].named_parameters()}
    model, teacher, student, result = run(accumulate=accumulate)
    want, want_teacher, center, loss = by_hand(start, accumulate == 2)
    held = dict(model.named_parameters())  # the teacher, which is kept
    assert teacher.step == (10 if accumulate == 1 else 5)
    for name, p in want.items():
        assert torch.allclose(student[name], p, rtol=0, atol=1e-12), name
        assert torch.allclose(held[name], want_teacher[name], rtol=0, atol=1e-12), name
        assert not torch.allclose(student[name], start[name]) and not torch.allclose(held[name], student[name])
    assert torch.allclose(teacher.center, center, rtol=0, atol=1e-12) and center.abs().max() > 0.01
    if accumulate == 2:
        assert result.rows[-1]["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(("views", "wholes"), [(5, 2), (2, 2)], ids=["with crops", "without"])
def test_the_loss_is_that_of_all_pairs_of_different_views(views, wholes):
    generator = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(n, 3, 7, generator=generator, dtype=torch.float64) for n in (views, wholes))
    center = torch.randn(7, generator=generator, dtype=torch.float64)
    loss, entropy = dino_loss(student, teacher, center, 0.1, 0.04)
    assert float(loss) == pytest.approx(float(loss_by_hand(student, teacher, center, 0.1, 0.04)), rel=1e-12)
    q = ((teacher - center) / 0.04).softmax(-1)
    assert float(entropy) == pytest.approx(float(-torch.xlogy(q, q).sum(-1).mean()), rel=1e-12)
    half = dino_loss(student.half(), teacher.half(), center.float(), 0.1, 0.04)[0]
    assert half.dtype == torch.float32 and float(half) == pytest.approx(float(loss), rel=2e-2)


def test_nothing_flows_back_to_the_teacher():
    student, teacher = torch.randn(3, 2, 4, requires_grad=True), torch.randn(2, 2, 4, requires_grad=True)
    dino_loss(student, teacher, torch.zeros(4), 0.1, 0.04)[0].backward()
    assert student.grad.abs().sum() > 0 and teacher.grad is None


def test_the_schedules_are_the_authors():
    """``cosine_scheduler`` and ``linspace`` of their code, for 100 epochs of 7 steps."""
    found = Schedules(700, 100, 0.996, 0.07, 0.04, 30, 1)
    t = np.arange(700)
    momentum = 1 + 0.5 * (0.996 - 1) * (1 + np.cos(np.pi * t / 700))
    temperature = np.repeat(np.concatenate([np.linspace(0.04, 0.07, 30), np.full(70, 0.07)]), 7)
    assert np.allclose([found.momentum_at(i) for i in t], momentum, rtol=0, atol=1e-15)
    assert np.allclose([found.temperature_at(i) for i in t], temperature, rtol=0, atol=1e-15)
    assert [i for i in t if found.frozen_at(i)] == list(range(7))
    assert Schedules(10, 10, 0.9, 0.07, 0.04, 1, 0).temperature_at(0) == 0.04


def test_a_step_without_finite_gradients_leaves_teacher_and_center_alone():
    model, objective, config = made()
    learner = Learner("", model, config, 10, objective)
    rows, others = Fixed().batches

    def step(spoil):
        learner.optimizer.zero_grad()
        loss, _ = objective.loss(model.train(), Batch(others if spoil else rows, torch.zeros(4)))
        loss.backward()
        if spoil:
            model.backbone.fc.weight.grad[0, 0] = math.nan
        return learner.update(NoScaler())

    assert step(False) and not step(True)
    teacher = objective.teacher
    before = {n: t.clone() for n, t in teacher.averages.items()}
    centre = teacher.center.clone()
    assert step(False) and teacher.step == 2
    # only the outputs of the step that was taken count
    with torch.no_grad():
        expected = outputs_by_hand(before, rows, 2).mean((0, 1))
    assert torch.allclose(teacher.center, 0.7 * centre + 0.3 * expected, rtol=0, atol=1e-12)


def test_a_step_that_is_left_out_leaves_the_teachers_batch_norms_alone():
    """Its own forward pass has counted the step's images by then, which may be the ones that are not finite."""
    model, objective, config = made()
    norm = nn.BatchNorm1d(5).double()
    model.backbone.fc = nn.Sequential(model.backbone.fc, norm)
    learner = Learner("", model, config, 10, objective)
    rows, others = Fixed().batches

    def step(rows, fails):
        learner.optimizer.zero_grad()
        learner.begin()
        loss, _ = objective.loss(model.train(), Batch(rows, torch.zeros(4)))
        loss.backward()
        if fails:
            norm.weight.grad[0] = math.nan
        return learner.update(NoScaler())

    assert step(rows, False)
    averages = objective.teacher.averages
    means = [averages["backbone.fc.1.running_mean"].clone(), norm.running_mean.clone()]
    assert all(mean.any() for mean in means)
    assert not step(others * math.inf, True)
    assert torch.equal(averages["backbone.fc.1.running_mean"], means[0]) and torch.equal(norm.running_mean, means[1])
    assert step(others, False) and not torch.equal(averages["backbone.fc.1.running_mean"], means[0])


def test_evaluation_compares_student_and_teacher_and_changes_neither():
    model, objective, _ = made()
    teacher = objective.average({n: p for n, p in model.named_parameters() if p.requires_grad}, 10)
    with torch.no_grad():
        for p in model.backbone.parameters():
            p.add_(0.1)
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    rows = Fixed().batches[0]
    want = loss_by_hand(
        outputs_by_hand(own, rows, 4), outputs_by_hand(teacher.averages, rows, 2), torch.zeros(6), 0.2, 0.05
    )
    model.eval()
    for place in (teacher.in_model(False), teacher.applied()):  # as in the middle of a run, and as at an epoch's end
        with torch.no_grad(), place:
            assert float(objective.loss(model, Batch(rows, torch.zeros(4)))[0]) == pytest.approx(float(want), rel=1e-12)
    assert all(torch.equal(own[n], p) for n, p in model.named_parameters()) and not teacher.center.any()


def test_the_prototypes_length_is_trained_if_asked():
    _, _, student, _ = run(unit_prototypes=False)
    assert not torch.allclose(student["projection.prototypes.length"], torch.ones(6, 1, dtype=torch.float64))
    assert torch.equal(run()[2]["projection.prototypes.length"], torch.ones(6, 1, dtype=torch.float64))


def test_a_state_of_other_prototypes_is_refused():
    model, objective, _ = made()
    teacher = objective.average(dict(model.named_parameters()), 10)
    state = teacher.state_dict()
    teacher.load_state_dict(state)
    for other in ({k: v for k, v in state.items() if k != "center"}, {**state, "center": torch.zeros(3)}):
        with pytest.raises(DataError, match="`--resume`: the saved state has no center of these prototypes"):
            teacher.load_state_dict(other)
