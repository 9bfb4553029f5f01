"""Distillation: its losses by hand in fp64, what the teacher sees, and which weights learn from whom."""

import dataclasses

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from vtk.card import Card, InputSpec, ModelSpec
from vtk.data.loading.normalization import Normalize
from vtk.errors import DataError, UsageError
from vtk.training.objectives.base import Batch, Classification
from vtk.training.objectives.distillation import Distillation, Teacher, Trained, load_trained
from vtk.training.objectives.multilabel import MultiLabel

CPU = torch.device("cpu")
SPEC = InputSpec(32, 32, 3, (0.5,) * 3, (0.5,) * 3)
CLASSES = ("a", "b", "c")


def vit(seed=0, name="vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(seed)
    small = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 32, "num_classes": 3, "patch_size": 16}
    model = timm.create_model(name, **{**small, **kwargs})
    torch.nn.init.normal_(model.head.weight)  # timm starts classifiers near 0, where all losses look alike
    return model


def teach(model=None, spec=SPEC, classes=CLASSES, student=SPEC, **card):
    card = Card(ModelSpec("vit_tiny_patch16_224"), spec, classes, **card)
    return Teacher(Trained(vit(1) if model is None else model, card, "the-teacher"), student, CPU)


def some(n=5, size=32):
    generator = torch.Generator().manual_seed(n)
    return Batch(torch.randn(n, 3, size, size, generator=generator), torch.arange(n) % 3)


def softmax(z, t=1.0):
    e = np.exp((z - z.max(1, keepdims=True)) / t)
    return e / e.sum(1, keepdims=True)


def logits_of(student, teacher, images):
    with torch.no_grad():
        return [m.double()(images.double()).numpy() for m in (student, teacher.model)]


@pytest.mark.parametrize(("kind", "alpha", "t"), [("soft", 0.5, 1.0), ("soft", 0.3, 4.0), ("hard", 0.7, 1.0)])
def test_logit_losses_are_the_papers(kind, alpha, t):
    student, teacher, batch = vit(), teach(), some()
    objective = Distillation(Classification(3, smoothing=0.1), teacher, student, kind=kind, alpha=alpha, temperature=t)
    found, numbers = objective.loss(student, objective.prepare(batch))
    z, w = logits_of(student, teacher, batch.images)
    target = np.eye(3)[batch.labels.numpy()] * 0.9 + 0.1 / 3
    labelled = -(target * np.log(softmax(z))).sum(1).mean()
    if kind == "soft":
        p, q = softmax(w, t), softmax(z, t)
        taught = t**2 * (p * np.log(p / q)).sum(1).mean()
    else:
        taught = -np.log(softmax(z)[np.arange(5), w.argmax(1)]).mean()
    assert float(found) == pytest.approx((1 - alpha) * labelled + alpha * taught, rel=1e-5)
    assert float(numbers["loss_teacher"]) == pytest.approx(taught, rel=1e-5)
    assert float(numbers["agreement"]) == pytest.approx((z.argmax(1) == w.argmax(1)).mean())


def test_a_student_that_equals_its_teacher_has_nothing_to_learn():
    student, batch = vit(), some()
    for kind in ("soft", "features", "tokens"):
        objective = Distillation(None, teach(vit()), student, kind=kind, alpha=1.0, spec=SPEC)
        found, _ = objective.loss(student.eval(), objective.prepare(batch))
        found.backward()
        assert float(found) == pytest.approx(0, abs=1e-6)
        assert max(float(p.grad.abs().max()) for p in student.parameters() if p.grad is not None) < 1e-4


@pytest.mark.parametrize("kind", ["features", "tokens"])
def test_features_are_timms(kind):
    student, teacher, batch = vit(), teach(), some()
    objective = Distillation(Classification(3), teacher, student, kind=kind, alpha=0.25, spec=SPEC)
    found, numbers = objective.loss(student, objective.prepare(batch))
    x = batch.images.double()
    with torch.no_grad():
        mine, theirs = (m.double().forward_features(x) for m in (student, teacher.model))
        if kind == "features":
            mine, theirs = (m.forward_head(v, pre_logits=True) for m, v in ((student, mine), (teacher.model, theirs)))
        taught = (mine - theirs).flatten(1).square().sum(1) / theirs.flatten(1).square().sum(1)
        labelled = torch.nn.functional.cross_entropy(student(x), batch.labels)
    assert float(numbers["loss_teacher"]) == pytest.approx(float(taught.mean()), rel=1e-5)
    assert float(found) == pytest.approx(0.75 * float(labelled) + 0.25 * float(taught.mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_several_labels_are_decisions_of_their_own(kind):
    student, teacher = vit(), teach(multi_label=True)
    batch = Batch(some().images, torch.tensor(np.random.default_rng(0).integers(0, 2, (5, 3)), dtype=torch.float32))
    t = 2.0 if kind == "soft" else 1.0
    objective = Distillation(MultiLabel(3), teacher, student, kind=kind, alpha=1.0, temperature=t, multi_label=True)
    found, _ = objective.loss(student, objective.prepare(batch))
    z, w = logits_of(student, teacher, batch.images)
    q = 1 / (1 + np.exp(-z / t))
    if kind == "soft":
        p = 1 / (1 + np.exp(-w / t))
        wanted = t**2 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
    else:
        wanted = -np.where(w > 0, np.log(q), np.log(1 - q)).mean()
    assert float(found) == pytest.approx(wanted, rel=1e-4)


def test_the_teacher_sees_the_image_in_its_own_normalisation_and_size():
    """Against the same pixels, normalised for the teacher from the start."""
    own = InputSpec(48, 48, 3, (0.48, 0.45, 0.4), (0.2, 0.25, 0.3))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    model = vit(1, img_size=48)
    teacher = teach(model, spec=own)
    assert len(teacher.notes) == 2 and "from 32×32 to 48×48" in teacher.notes[1]
    found = teacher.answer(Normalize(SPEC)(image)[None], "soft")
    pixels = Normalize(own)(image)[None]
    with torch.no_grad():
        wanted = model(torch.nn.functional.interpolate(pixels, (48, 48), mode="bicubic", antialias=True))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    same = teach()
    assert same.notes == [] and torch.equal(same.answer(some().images, "soft"), same.model(some().images))


def test_the_teacher_is_asked_once_and_about_mixed_images():
    student, teacher, batch = vit(), teach(), some(4)
    asked = []
    teacher.model.register_forward_pre_hook(lambda module, args: asked.append(args[0]))
    objective = Distillation(Classification(3, mixup=0.8), teacher, student)
    objective.start_epoch(3)
    taught = objective.prepare(Batch(batch.images.clone(), batch.labels))
    for _ in range(2):
        objective.loss(student, taught)
    assert len(asked) == 1 and torch.equal(asked[0], taught.images) and not torch.equal(asked[0], batch.images)
    assert not any(p.requires_grad for p in teacher.model.parameters()) and not teacher.model.training
    assert not taught.answer.requires_grad


def test_of_two_heads_one_learns_the_labels_and_one_the_teacher():
    student = vit(name="deit_tiny_distilled_patch16_224").train()
    objective = Distillation(Classification(3), teach(), student, kind="hard", alpha=0.5)
    taught = objective.prepare(some())
    loss, _ = objective.loss(student, taught)
    loss.backward()
    logits, own = student(taught.images)
    for head, z, labels in ((student.head, logits, taught.labels), (student.head_dist, own, taught.answer.argmax(1))):
        z = z.detach().requires_grad_()
        torch.nn.functional.cross_entropy(z, labels).backward()
        torch.testing.assert_close(head.bias.grad, 0.5 * z.grad.sum(0), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert student.eval()(taught.images).shape == (5, 3)  # used as before: both averaged


@pytest.mark.parametrize(("kind", "alpha"), [("soft", 1.0), ("features", 0.5), ("tokens", 1.0)])
def test_of_two_heads_none_is_left_with_nothing_to_learn(kind, alpha):
    """Where there is one target for logits, both heads, averaged as in use, learn it."""
    student = vit(name="deit_tiny_distilled_patch16_224").train()
    teacher = teach(vit(1, name="deit_tiny_distilled_patch16_224"))
    objective = Distillation(Classification(3), teacher, student, kind=kind, alpha=alpha, spec=SPEC)
    taught = objective.prepare(some())
    loss, _ = objective.loss(student, taught)
    loss.backward()
    assert not isinstance(student(taught.images), tuple)
    moved = alpha < 1 or kind == "soft"
    for head in (student.head, student.head_dist):
        assert bool(head.weight.grad.abs().max() > 0) == moved


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("features", {"embed_dim": 24}, "the student has features of width 16, the-teacher features of width 24"),
        ("tokens", {"patch_size": 8}, "the student has tokens 5 × 16, the-teacher tokens 17 × 16"),
    ],
)
def test_features_that_cannot_be_compared_are_refused(kind, other, message):
    student = vit().train()
    with pytest.raises(UsageError, match=message):
        Distillation(Classification(3), teach(vit(1, **other)), student, kind=kind, spec=SPEC)
    assert student.training


@pytest.mark.parametrize(
    ("classes", "card", "message"),
    [
        (("b", "a", "c"), {}, "the classes in another order"),
        (("a", "b"), {}, "has 2 classes, the images have 3"),
        (("a", "b", "d"), {}, "has class `d` where the images have `c`"),
        (CLASSES, {"multi_label": True}, "was trained with several labels an image"),
    ],
)
def test_a_teacher_of_other_classes_is_refused(classes, card, message):
    with pytest.raises(UsageError, match=message) as refused:
        teach(classes=classes, **card).check_classes(CLASSES, False)
    assert "\n" not in str(refused.value) and "features or tokens" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill_alpha": 0.3}, "`--distill-alpha` needs a teacher; add --distill-from"),
        ({"distill_from": "x", "distill_alpha": 0.0}, "`--distill-alpha` is 0.0; allowed is above 0, at most 1"),
        ({"distill_from": "x", "distill_temperature": -1.0}, "allowed is above 0"),
        ({"distill_from": "x", "distill_kind": "hard", "distill_temperature": 2.0}, "needs --distill-kind soft, but the kind is hard"),
        ({"distill_from": " "}, "`--distill-from` is ' '; allowed is a pack"),
        ({"distill_from": "x", "data": None, "tasks": ("a=x", "b=y")}, "give one run for each"),
        ({"distill_from": "x", "distill_alpha": 1.0, "class_weights": "balanced"}, "--distill-alpha 1 leaves nothing"),
    ],
)
def test_options_that_contradict_each_other(config, changes, message):
    with pytest.raises(UsageError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nowhere/at.safetensors", DataError, "does not exist"),
        ("./nowhere", DataError, "does not exist"),
        ("no_such_vit", UsageError, "no file or folder here, and as a model name"),
        ("model.onnx", UsageError, "is no teacher"),
    ],
)
def test_what_is_no_teacher(name, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(error, match=message):
        load_trained(name)


def test_the_identity_is_of_the_weights_and_the_input():
    first, again = teach().identity, teach(vit(1)).identity
    assert first == again
    other = dataclasses.replace(SPEC, mean=(0.4,) * 3)
    assert len({first, teach(vit(2)).identity, teach(spec=other).identity}) == 3
