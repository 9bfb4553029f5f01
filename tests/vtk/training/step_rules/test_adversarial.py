"""Fast adversarial training against a step written by hand, and what its images may be."""

import pytest
import torch
import torch.nn.functional as F

from tests.vtk.training._two_pass import Fixed, Net, ascent
from tests.vtk.training.step_rules.test_sam import Counted, run
from vtk.card import InputSpec
from vtk.data.loading.samplers import mix
from vtk.errors import UsageError
from vtk.training.engine.loss_scale import DynamicScaler
from vtk.training.engine.precision import Bf16, Fp32
from vtk.training.frozen_ffn.blocks import apply_memory_mode
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy
from vtk.training.step_rules.adversarial import Adversary
from vtk.training.step_rules.sam import Ascent

MEAN, STD = (0.5, 0.4, 0.6), (0.5, 0.25, 0.2)
INPUT = InputSpec(4, 4, mean=MEAN, std=STD)


def pixels(images):
    """Undo the normalisation."""
    mean, std = (torch.tensor(v, dtype=images.dtype)[:, None, None] for v in (MEAN, STD))
    return images * std + mean


def normal(pixels):
    mean, std = (torch.tensor(v, dtype=pixels.dtype)[:, None, None] for v in (MEAN, STD))
    return (pixels - mean) / std


def pictures(*sizes, seed=0, dtype=torch.float64, side=4):
    """Batches of pixels from 0 to 1, some of them at the ends, normalised."""
    stream = Fixed(*sizes, seed=seed, side=side, dtype=dtype)
    stream.batches = [(normal(((x + 1) / 2 * 1.2 - 0.1).clamp(0, 1)), y) for x, y in stream.batches]
    return stream


def by_hand(model, stream, eps, rho=None, epochs=2):
    """Train by images made in units of pixels, one batch a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.0)
    names, weights = zip(*model.named_parameters(), strict=True)
    eps = eps / 255
    model.train()
    for epoch in range(epochs):
        torch.manual_seed(mix(0, epoch, 0))
        for images, labels in stream.batches:
            clean = pixels(images)
            noise = (torch.rand(images.shape, dtype=images.dtype) * 2 - 1) * eps
            start = normal((clean + noise).clamp(0, 1)).requires_grad_()
            state = torch.get_rng_state()
            first, *gradients = torch.autograd.grad(F.cross_entropy(model(start), labels), [start, *weights])
            delta = (pixels(start.detach()) - clean + 1.25 * eps * first.sign()).clamp(-eps, eps)
            changed = normal((clean + delta).clamp(0, 1))
            with torch.no_grad():
                at = weights if rho is None else ascent(weights, gradients, rho, adaptive=False)
            tensors = {n: w.detach().requires_grad_() for n, w in zip(names, at, strict=True)}
            buffers = {n: b.clone() for n, b in model.named_buffers()}
            torch.set_rng_state(state)
            loss = F.cross_entropy(torch.func.functional_call(model, {**tensors, **buffers}, (changed,)), labels)
            for w, g in zip(weights, torch.autograd.grad(loss, list(tensors.values())), strict=True):
                w.grad = g
            optimizer.step()


@pytest.mark.parametrize("rho", [None, 0.1], ids=["alone", "with sam"])
def test_equals_a_step_written_by_hand(rho):
    stream, ours, theirs = pictures(6, 6, 3), Net(), Net()
    by_hand(theirs, stream, 8, rho)
    run(ours, stream, Ascent(rho, adversary=Adversary(8, [INPUT])), clip_grad=0.0)
    for name, tensor in theirs.state_dict().items():  # pixels round otherwise there
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rho", [None, 0.1])
def test_both_ascents_cost_one_more_pass_together(rho):
    objective = Counted()
    run(Net(), pictures(6, 4), Ascent(rho, adversary=Adversary(8, [INPUT])), objective=objective, epochs=1)
    assert objective.forward == objective.backward == [6, 6, 4, 4]


def test_without_sam_the_first_pass_computes_no_gradient_of_a_weight():
    model, calls = Net(), []
    model.first.weight.register_hook(calls.append)
    run(model, pictures(6, 4), Ascent(adversary=Adversary(8, [INPUT])), epochs=1)
    assert len(calls) == 2


class Kept(Classification):
    """Keeps the images and losses of every pass."""

    def __init__(self, **kwargs):
        super().__init__(3, **kwargs)
        self.seen = []

    def loss(self, model, batch):
        loss, numbers = super().loss(model, batch)
        self.seen.append((batch.images.detach().clone(), batch.labels, float(loss.detach())))
        return loss, numbers


@pytest.mark.parametrize("eps", [0.5, 2, 8, 255])
@pytest.mark.parametrize("precision", [Fp32, Bf16])
def test_images_stay_in_the_ball_and_pictures_and_raise_the_loss(eps, precision):
    stream, objective, model = pictures(16, 16, dtype=torch.float32), Kept(mixup=0.8), Net(0.0).float()
    # the weights stay as good as where they are, so that losses are of one model
    run(model, stream, Ascent(adversary=Adversary(eps, [INPUT])), precision(), objective, lr=1e-12, epochs=1)
    started, changed = objective.seen[0::2], objective.seen[1::2]
    for (first, targets, before), (second, same, after), (clean, _) in zip(
        started, changed, stream.batches, strict=True
    ):
        assert targets is same and targets.ndim == 2  # mixed
        for found in (first, second):
            assert -1e-6 <= float(pixels(found).min()) and float(pixels(found).max()) <= 1 + 1e-6
        assert float((pixels(second) - pixels(first)).abs().max()) <= min(2 * eps / 255, 1) + 1e-6
        assert after > before
        assert not torch.equal(first, clean)


def test_the_ball_is_around_the_image_that_was_given():
    adversary, batch = Adversary(8, [INPUT]), Batch(*pictures(64).batches[0])
    started = adversary.start(batch)
    (started.images * torch.randn(batch.images.shape)).sum().backward()
    found = adversary.attack(batch, started).images
    change = pixels(found) - pixels(batch.images)
    assert float(change.abs().max()) == pytest.approx(8 / 255, rel=1e-9)
    inside = (pixels(batch.images) > 9 / 255) & (pixels(batch.images) < 1 - 9 / 255)
    # a step of 1.25 ε reaches the ball's side from five eighths of its width of two
    reached = change.abs() > 7.999 / 255
    assert float(reached[inside].double().mean()) == pytest.approx(0.625, abs=0.03)
    noise = (pixels(started.images.detach()) - pixels(batch.images))[inside] * 255 / 8
    assert float(noise.abs().max()) <= 1 + 1e-9 and abs(float(noise.mean())) < 0.05
    assert float(noise.std()) == pytest.approx(3**-0.5, rel=0.05)  # even


def test_streams_have_their_own_normalisation():
    adversary = Adversary(255, [InputSpec(4, 4), InputSpec(4, 4, mean=(0.0,) * 3, std=(1.0,) * 3)])
    images = torch.full((1, 3, 64, 64), 0.5)
    zero, one = (adversary.start(Batch(images, torch.zeros(1), stream)).images for stream in (0, 1))
    assert float(zero.min()) == -1 and float(zero.max()) == 1
    assert float(one.min()) == 0 and float(one.max()) == 1


def test_an_objective_without_images_is_refused():
    class Blind(Classification):
        def loss(self, model, batch):
            return super().loss(model, Batch(batch.images.detach(), batch.labels))

    with pytest.raises(UsageError, match=r"--adversarial.*no gradient for the images") as told:
        run(Net(), pictures(6), Ascent(0.1, adversary=Adversary(8, [INPUT])), objective=Blind(3))
    assert "\n" not in str(told.value)


def test_a_gradient_of_the_images_that_is_no_number_leaves_the_step_out():
    class Spoilt(Net):
        def forward(self, images):
            if images.requires_grad:
                images.register_hook(lambda g: torch.full_like(g, float("nan")))
            return super().forward(images)

    model = Spoilt()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    scaler = DynamicScaler("cpu", 4096.0)
    result, _ = run(model, pictures(6), Ascent(adversary=Adversary(8, [INPUT])), Fp32(scaler), epochs=1)
    assert result.rows[0]["skipped_steps"] == 1 and scaler.factor == 2048
    params = dict(model.named_parameters())
    assert all(torch.equal(params[n], before[n]) for n in params)


def vit(tiny, train):
    model = tiny()
    policy.apply(model, policy.select(model, train))
    return model


@pytest.mark.parametrize("train", ["attn", "head"])
@pytest.mark.parametrize("mode", ["act8", "recompute", "minimal"])
def test_memory_modes_give_the_images_the_same_gradient(tiny, mode, train):
    """Through frozen norms, FFNs and stem, also where no weight of theirs needs one."""
    stream = pictures(6, 6, dtype=torch.float32, side=32)
    spec = InputSpec(32, 32, mean=MEAN, std=STD)
    found = []
    for each in ("plain", mode):
        model, objective = vit(tiny, train), Kept()
        apply_memory_mode(model, each)
        rule = Ascent(0.05, adversary=Adversary(8, [spec]))
        run(model, stream, rule, objective=objective, epochs=1, lr=1e-3)
        found.append((objective.seen, {n: p.detach() for n, p in model.named_parameters()}))
    (plain, weights), (ours, moved) = found
    for (a, _, x), (b, _, y) in zip(plain, ours, strict=True):
        differ = (a - b).abs() > 1e-5  # a sign where the gradient is next to nothing
        assert float(differ.double().mean()) < (0.02 if mode == "act8" else 0.002)
        assert x == pytest.approx(y, rel=1e-3)
    far = max(float((weights[n] - moved[n]).abs().max()) for n in weights)
    assert far < 2.5e-3  # AdamW moves by lr at most, in two steps
