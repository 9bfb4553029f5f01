"""Every option of loss and sampling beside every other: a run does what docs/guides/training.md says, or is refused."""

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.vtk.training._loss_formulas import Descent, Formulas, Mixed
from vtk.card import Card, InputSpec, ModelSpec
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.loading.samplers import EpochSampler
from vtk.errors import UsageError
from vtk.training.engine.fitting import fit
from vtk.training.engine.precision import Fp32
from vtk.training.engine.processes import Ranks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch, JointObjective
from vtk.training.objectives.distillation import Teacher, Trained, distill
from vtk.training.runs.label_kinds import make_objective, make_sampler
from vtk.training.step_rules.sharpness import make_step_rule
from vtk.training.train_config import TrainConfig

CPU = torch.device("cpu")
SPEC = InputSpec(4, 4, 3, (0.5,) * 3, (0.5,) * 3)
SIZES = (7, 7, 3)
CELLS = {
    "class weights": {"class_weights": "balanced"},
    "several labels": {"multi_label": True},
    "mixup": {"mixup": 0.8},
    "no smoothing": {"smoothing": 0.0},
    "much smoothing": {"smoothing": 0.4},
    "cutmix": {"cutmix": 1.0},
    "half mixed": {"mixup": 0.8, "cutmix": 1.0, "mix_prob": 0.5},
    "balanced sampler": {"sampler": "balanced"},
    "repeats": {"aug_repeats": 3},
    "empty class": {"keep_empty_classes": True},
    "bce": {"loss": "bce"},
    "bce-sum": {"loss": "bce-sum"},
    "bce threshold": {"loss": "bce", "bce_threshold": 0.2},
    "teacher": {"distill_from": "teacher"},
    "warm teacher": {
        "distill_from": "teacher",
        "distill_kind": "soft",
        "distill_alpha": 0.3,
        "distill_temperature": 3.0,
    },
    "hard teacher": {"distill_from": "teacher", "distill_kind": "hard"},
    "features": {"distill_from": "teacher", "distill_kind": "features"},
    "tokens": {"distill_from": "teacher", "distill_kind": "tokens"},
    "teacher alone": {"distill_from": "teacher", "distill_alpha": 1.0},
    "accumulated": {"accumulate": 2},
    "SAM": {"sam": 0.05},
    "adaptive SAM": {"sam": 0.5, "sam_adaptive": True},
    "SAM of four": {"sam": 0.05, "sam_m": 4},
    "adversarial": {"adversarial": 4.0},
}
# the first rows hold what works on labels beside everything; the others run among the slow tests
ROWS = [None, *(name if i < 4 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(CELLS))]
LOSSES = ("bce", "bce-sum", "bce threshold")
REFUSED = {
    frozenset(pair)
    for pair in (
        ("class weights", "balanced sampler"), ("several labels", "balanced sampler"), ("repeats", "balanced sampler"),
        ("several labels", "empty class"), ("class weights", "teacher alone"),
        *(("class weights", loss) for loss in LOSSES), *(("several labels", loss) for loss in LOSSES),
        *(("teacher alone", loss) for loss in LOSSES),
    )
}  # fmt: skip


def merged(*names):
    """Return the options of cells together; None where they contradict each other."""
    found = {}
    for name in names:
        if any(found.get(key, value) != value for key, value in CELLS[name].items()):
            return None
        found |= CELLS[name]
    return found


class Small(nn.Module):
    """A model of two tokens of an image, with a classifier and a final norm where timm has them."""

    def __init__(self, classes, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.norm, self.head = nn.Linear(24, 5), nn.LayerNorm(5), nn.Linear(5, classes)
        nn.init.normal_(self.head.weight)

    def parts(self, images):
        tokens = self.norm(torch.tanh(self.body(images.flatten(1).unflatten(1, (2, 24)))))
        features = tokens.mean(1)
        return self.head(features), {"features": features, "tokens": tokens}

    def forward(self, images):
        return self.parts(images)[0]


class Open(Small):
    forward = Small.parts


class Memory:
    """Images of an epoch, drawn by a sampler; the first channel of each is one value of its own."""

    def __init__(self, labels, sampler):
        generator = torch.Generator().manual_seed(5)
        self.images = torch.rand(len(labels), 3, 4, 4, generator=generator, dtype=torch.float64) * 2 - 1
        self.images[:, 0] = torch.linspace(-0.9, 0.9, len(labels), dtype=torch.float64)[:, None, None]
        self.labels, self.sampler, self.sizes, self.drawn = labels, sampler, SIZES, []

    def epoch(self, index):
        self.sampler.set_epoch(index)
        self.drawn = [i for _, i in self.sampler]
        for rows in torch.tensor(self.drawn).split(list(SIZES)):
            yield Batch(self.images[rows], self.labels[rows])


def some(config):
    """Return labels of 17 images, and how many classes they may have: 10, 5 and 2 images of one, or any number."""
    if config.multi_label:
        labels = np.random.default_rng(1).random((17, 5)) < np.array([0.5, 0.2, 0.0, 1.0, 0.7])
        labels[:, 1] = np.arange(17) == 3  # one rare label, one that no image has, one that all have
        return torch.tensor(labels, dtype=torch.float32), 5
    return torch.tensor([0] * 10 + [1] * 5 + [2] * 2), 4 if config.keep_empty_classes else 3


def audit_of(labels, classes):
    samples = [Sample(Path(f"{i}.png"), y.numpy() if y.ndim else int(y)) for i, y in enumerate(labels)]
    return DataAudit(Path(), "split", tuple(map(str, range(classes))), tuple(samples), ())


class Watched:
    """An objective, and the batches that it prepared."""

    def __init__(self, inner, teacher):
        self.inner, self.teacher, self.batches = inner, teacher, []
        self.start_epoch, self.loss, self._prepare = inner.start_epoch, inner.loss, inner.prepare
        inner.prepare = self.prepare

    def prepare(self, batch):
        before, labels = batch.images.clone(), batch.labels.clone()
        after = self._prepare(batch)
        even = len(before) // 2 * 2
        other = torch.cat([torch.arange(even).flip(0), torch.arange(even, len(before))])
        own, mixed_in = before[:, 0, 0, 0], before[other, 0, 0, 0]
        same = own == mixed_in
        share = (after.images[:, 0].mean((1, 2)) - mixed_in) / torch.where(same, 1.0, own - mixed_in)
        with torch.no_grad():
            logits, inside = self.teacher.parts(after.images)
        answer = {"logits": logits, **inside}
        self.batches.append(Mixed(after.images.clone(), labels, labels[other], torch.where(same, 1.0, share), answer))
        return after


def go(config):
    """Train for an epoch by the engine, and by the formulas; compare losses, images and weights."""
    labels, classes = some(config)
    audit = audit_of(labels, classes)
    stream = Memory(labels, make_sampler(config, audit) or EpochSampler(17, shuffle=True, seed=0))
    model, told = Small(classes, 0).double(), Small(classes, 1).double()
    reference = Open(classes, 0).double()
    objective = make_objective(config, audit)
    if config.distill_from:
        card = Card(ModelSpec("small"), SPEC, audit.classes, multi_label=config.multi_label)
        teacher = Teacher(Trained(copy.deepcopy(told), card, "teacher"), SPEC, CPU, torch.float64)
        objective = distill(objective, teacher, model, config, SPEC, new_classifier=False)
    watched = Watched(objective, told)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    rule, _ = make_step_rule(config, model, [SPEC], Ranks(CPU))
    row = fit(model, watched, [stream], config, Fp32(), step_rule=rule, show_progress=False).rows[0]

    descent = Descent(reference, Formulas(config, labels, classes), config)
    batches, calls = iter(watched.batches), iter(seen)
    per_step = [SIZES[i : i + config.accumulate] for i in range(0, len(SIZES), config.accumulate)]
    for sizes in per_step:
        parts = list(itertools.islice(batches, len(sizes)))
        if config.sam_m is not None:
            rows = [r for part in parts for r in torch.arange(len(part.own)).tensor_split(-(-len(part.own) // 4))]
            whole = [part for part in parts for _ in range(-(-len(part.own) // 4))]
            groups = [[part.rows(r)] for part, r in zip(whole, rows, strict=True)]
        else:
            groups = [parts]
        started, then = [], []
        for group in groups:
            started.append(torch.cat([next(calls) for _ in group]))
            if rule is not None:
                then.append(torch.cat([next(calls) for _ in group]))
        found = descent.step([join(group) for group in groups], started)
        for mine, theirs in zip(found, then, strict=False):
            assert torch.isclose(mine, theirs, atol=1e-6).double().mean() > 0.99  # the sign of 0 is anyone's
    assert next(calls, None) is None
    wanted = sum(descent.losses) / 17
    assert row["loss"] == pytest.approx(wanted, rel=1e-6)
    if rule is not None:
        assert row["perturbed_loss"] == pytest.approx(sum(descent.perturbed) / 17, rel=1e-6)
    assert_same_weights(model, descent, reference)
    return stream.drawn, labels


def assert_same_weights(model, descent, start):
    """Compare how far weights moved; soft targets are fp32, hence not to the last bit."""
    begin = dict(start.named_parameters())
    for name, p in model.named_parameters():
        moved = (descent.weights[name] - begin[name]).detach().abs().max()
        torch.testing.assert_close(p.detach(), descent.weights[name], rtol=0, atol=2e-6 * float(moved) + 1e-12)


def join(group):
    """Return the batches of a group as one."""
    answer = {key: torch.cat([part.answer[key] for part in group]) for key in group[0].answer}
    names = ("images", "own", "other", "share")
    return Mixed(*(torch.cat([getattr(part, name) for part in group]) for name in names), answer)


def config_of(kind=TrainConfig, **options):
    plain = {
        "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "warmup": 0.0, "min_lr": 1.0,
        "head_lr_mult": 1.0, "lr": 0.1, "epochs": 1, "batch_size": 7, "model": "small", "device": "cpu",
    }  # fmt: skip
    return kind(**{"data": Path("images"), **plain, **options})


@pytest.mark.parametrize("first", ROWS)
def test_options_together_are_the_formulas_or_refused(first):
    """The option alone (None: the defaults), and beside each that comes after it in the table."""
    names = list(CELLS)
    pairs = [(first,)] if first else [()]
    pairs += [(first, second) for second in names[names.index(first) + 1 :]] if first else []
    for pair in pairs:
        options = merged(*pair)
        if options is None:
            continue
        if frozenset(pair) in REFUSED:
            with pytest.raises(UsageError) as refused:
                config_of(**options)
                pytest.fail(f"{pair} was accepted")
            assert "\n" not in str(refused.value) and "`--" in str(refused.value)
            continue
        try:
            drawn, labels = go(config_of(**options))
        except Exception as error:
            error.add_note(f"options: {pair}")
            raise
        if "balanced sampler" in pair:
            counts = torch.bincount(labels[drawn]).tolist()
            assert sorted(counts) == [5, 6, 6], pair
        elif "repeats" in pair:
            assert [i for i in drawn[::3] for _ in range(3)][:17] == drawn, pair
        else:
            assert sorted(drawn) == list(range(17)), pair


class Two(nn.Module):
    """The models of two tasks in one forward pass."""

    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *images, tasks):
        return [self.models[i](x) for i, x in zip(tasks, images, strict=True)]


@pytest.mark.parametrize("name", ["no smoothing", "class weights", "mixup", "several labels", "balanced sampler"])
def test_each_of_several_tasks_is_the_formulas(name):
    """Two tasks whose classes are unequal in different ways, with uneven batches in a step."""
    balanced = {} if name == "balanced sampler" else {"class_weights": "balanced"}
    config = config_of(FinetuneConfig, **{**CELLS[name], **balanced, "accumulate": 2})
    labels, classes = some(config)
    of_tasks = [labels, labels.flip(0, 1) if config.multi_label else (labels + (torch.arange(17) % 3 == 0)) % 3]
    models, start = ([kind(classes, i).double() for i in range(2)] for kind in (Small, Open))
    streams, watched = [], []
    for i, own in enumerate(of_tasks):
        audit = audit_of(own, classes)
        streams.append(Memory(own, make_sampler(config, audit) or EpochSampler(17, shuffle=True, seed=i)))
        watched.append(Watched(make_objective(config, audit), start[0]))
    row = fit(
        Two(*models), JointObjective([one.inner for one in watched]), streams, config, Fp32(), show_progress=False,
        learners={"a": models[0], "b": models[1]},
    ).rows[0]  # fmt: skip
    for i, task in enumerate("ab"):
        descent = Descent(start[i], Formulas(config, of_tasks[i], classes), config)
        for whole in (join(watched[i].batches[:2]), join(watched[i].batches[2:])):
            descent.step([whole], [whole.images])
        assert row[f"loss {task}"] == pytest.approx(sum(descent.losses) / 17, rel=1e-6)
        assert_same_weights(models[i], descent, start[i])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_options_together_are_the_formulas(seed):
    """Three to six cells at a time, drawn by chance."""
    random = np.random.default_rng(seed)
    names, done = list(CELLS), 0
    while done < 10:
        some_of_them = [names[i] for i in random.choice(len(names), random.integers(3, 7), replace=False)]
        options = merged(*some_of_them)
        if options is None or any(pair <= set(some_of_them) for pair in REFUSED):
            continue
        try:
            go(config_of(**options))
        except Exception as error:
            error.add_note(f"options: {some_of_them}")
            raise
        done += 1
