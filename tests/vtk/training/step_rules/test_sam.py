"""Sharpness-aware steps against steps written by hand (`_two_pass`), and what they leave as it was."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.vtk.training._two_pass import Fixed, Net, clip, two_pass
from vtk.data.loading.samplers import mix
from vtk.training.engine import compile_passes as compiled
from vtk.training.engine.fitting import DivergedError, fit
from vtk.training.engine.loss_scale import DynamicScaler
from vtk.training.engine.precision import Bf16, Fp32
from vtk.training.engine.step_plan import Part, cut
from vtk.training.engine.step_rule import PlainStep
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy
from vtk.training.step_rules.sam import Ascent, climbed


def run(model, stream, rule, precision=None, objective=None, **changes):
    flags = {"epochs": 2, "lr": 3e-2, "head_lr_mult": 1.0, "weight_decay": 0.0, "warmup": 0.0, "min_lr": 1.0, **changes}
    config = FinetuneConfig(**flags)
    states = []

    def keep(end):
        states.append(copy.deepcopy(end.state({})))
        return {}

    result = fit(
        model, objective or Classification(3), [stream], config, precision or Fp32(), step_rule=rule, on_epoch=keep,
        show_progress=False,
    )  # fmt: skip
    return result, states


def by_hand(model, stream, rho, adaptive=False, accumulate=1, clip_grad=1.0, split=None, epochs=2, seeded=False):
    """Train ``model`` by AdamW, for as long as `run` does; return (loss, perturbed loss, images) of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.0)
    model.train()
    rows = []
    for epoch in range(epochs):
        if not seeded:
            torch.manual_seed(mix(0, epoch, 0))
        for first in range(0, len(stream.batches), accumulate):
            step = stream.batches[first : first + accumulate]
            count = sum(len(labels) for _, labels in step)
            gradients, losses = two_pass(model, split(step) if split else [step], count, rho, adaptive)
            for name, gradient in clip(gradients, clip_grad).items():
                dict(model.named_parameters())[name].grad = gradient
            optimizer.step()
            rows.append((*losses, count))
    return rows


def threes(step):
    """Cut batches of six images into halves, each a group."""
    return [[(x[a : a + 3], y[a : a + 3])] for x, y in step for a in range(0, len(y), 3)]


def twos(step):
    """Join batches to groups of two."""
    return [step[i : i + 2] for i in range(0, len(step), 2)]


CASES = {
    "plain": (Ascent(0.05), {}, {}),
    "adaptive": (Ascent(0.5, adaptive=True), {"adaptive": True}, {}),
    "accumulation": (Ascent(0.05), {"accumulate": 2}, {}),
    "clipping": (Ascent(0.2), {"clip_grad": 0.01}, {}),
    "no clipping": (Ascent(0.2), {"clip_grad": 0.0}, {}),
    "m below the batch": (Ascent(0.05, most=3), {}, {"split": threes}),
    "m above the batch": (Ascent(0.05, most=12), {"accumulate": 4}, {"split": twos}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_two_passes_written_by_hand(case):
    rule, flags, own = CASES[case]
    stream = Fixed(6, 6, 6, 6, 3)
    ours, theirs = Net(), Net()
    rows = by_hand(theirs, stream, rule.rho, **{**flags, **own})
    result, _ = run(ours, stream, rule, **{k: v for k, v in flags.items() if k != "adaptive"})
    for name, tensor in theirs.state_dict().items():  # parameters, statistics, and how often they were counted
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=0, atol=1e-12)
    half = len(rows) // 2
    for row, part in zip(result.rows, (rows[:half], rows[half:]), strict=True):
        for i, key in enumerate(("loss", "perturbed_loss")):
            assert row[key] == pytest.approx(sum(r[i] * r[2] for r in part) / 27, rel=1e-6), key  # added up in fp32


def test_the_ascent_matters():
    """What the cases above compare would also agree if neither side climbed."""
    stream, (plain, climbed, adaptive) = Fixed(6, 6), (Net(), Net(), Net())
    run(plain, stream, None)
    run(climbed, stream, Ascent(0.05))
    run(adaptive, stream, Ascent(0.05, adaptive=True))
    weights = [net.first.weight for net in (plain, climbed, adaptive)]
    assert all((a - b).abs().max() > 1e-6 for a, b in zip(weights, weights[1:] + weights[:1], strict=True))


def test_batches_that_are_added_up_climb_as_one():
    parts, whole = Fixed(4, 4, 2), Fixed(10)
    whole.batches = [tuple(torch.cat(t) for t in zip(*parts.batches, strict=True))]
    one, many = Net(0.0, norm=False), Net(0.0, norm=False)
    run(many, parts, Ascent(0.1), accumulate=3)
    run(one, whole, Ascent(0.1))
    torch.testing.assert_close(many.state_dict(), one.state_dict(), rtol=0, atol=1e-12)


def test_a_batch_of_one_image_has_no_statistics():
    """It climbs by the running ones, in both passes, and leaves them alone."""
    model, without = Net(0.0), Net(0.0)
    run(model, Fixed(6, 1), Ascent(0.1), epochs=1, accumulate=2)
    run(without, Fixed(6), Ascent(0.1), epochs=1)
    assert int(model.norm.num_batches_tracked) == 1
    assert torch.equal(model.norm.running_mean, without.norm.running_mean)


class Counted(Classification):
    """Counts passes by the images in them."""

    def __init__(self):
        super().__init__(3)
        self.forward, self.backward = [], []

    def loss(self, model, batch):
        self.forward.append(len(batch.images))
        loss, numbers = super().loss(model, batch)
        loss.register_hook(lambda _: self.backward.append(len(batch.images)))
        return loss, numbers


@pytest.mark.parametrize(
    ("most", "wanted"), [(None, [6, 4, 6, 4]), (6, [6, 6, 4, 4]), (3, [3, 3, 3, 3, 2, 2, 2, 2]), (10, [6, 4, 6, 4])]
)
def test_every_image_goes_twice_through_the_model_and_back(most, wanted):
    objective = Counted()
    run(Net(), Fixed(6, 4), Ascent(0.05, most=most), objective=objective, accumulate=2, epochs=1)
    assert objective.forward == objective.backward == wanted


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 9, 100])
def test_groups_hold_every_image_once_and_no_more_than_most(most):
    sizes = [(4, 9), (4, None), (3, 2), (8, 1)]
    parts = [
        Part([Batch(torch.arange(n) + 100 * i, torch.arange(n), s) for s, n in enumerate(both) if n], i == 3)
        for i, both in enumerate(sizes)
    ]
    groups = cut(parts, most)
    for stream in (0, 1):
        found = [[b for part in group for b in part.batches if b.stream == stream] for group in groups]
        assert all(sum(len(b.images) for b in group) <= most for group in found)
        assert all(torch.equal(b.images % 100, b.labels) for group in found for b in group)
        images = torch.cat([b.images for group in found for b in group])
        wanted = torch.cat([b.images for part in parts for b in part.batches if b.stream == stream])
        assert torch.equal(images, wanted)
    assert [part.last for group in groups for part in group][-2:] in ([False, True], [True])
    assert sum(part.last for group in groups for part in group) == 1
    assert len(cut(parts, None)) == 1


def copied(model):
    return {n: t.clone() for n, t in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


class Breaks(Net):
    """Fails in the forward passes whose numbers are given."""

    def __init__(self, *at):
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, images):
        self.calls += 1
        if self.calls in self.at:
            raise KeyboardInterrupt
        return super().forward(images)


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_step_leaves_the_weights_as_they_were(at):
    model = Breaks(at)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(KeyboardInterrupt):
        run(model, Fixed(6), Ascent(0.3))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def spoil(model, at):
    """Make the gradient of one weight infinite in the backward passes numbered in ``at``."""
    calls = []

    def hook(grad):
        calls.append(1)
        return torch.full_like(grad, float("inf")) if len(calls) in at else grad

    model.first.weight.register_hook(hook)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_pass_that_is_not_finite_leaves_the_whole_step_out(at, scaled, adaptive):
    """Weights, statistics, moments, learning rate: the next step is as if there had been none before it."""
    model, calm, stream = Net(), Net(), Fixed(6, 6)
    spoil(model, {at})
    scaler = DynamicScaler("cpu", 1024.0) if scaled else None
    result, (state,) = run(model, stream, Ascent(0.1, adaptive=adaptive), Fp32(scaler), epochs=1, ema=0.0)
    assert state.schedule["last_epoch"] == 1 and state.ema["step"] == 1
    assert not scaled or (state.scaler["scale"] == 512.0 and result.rows[0]["skipped_steps"] == 1)
    torch.manual_seed(mix(0, 0, 0))
    nn.functional.dropout(torch.ones(6, 8, dtype=torch.float64), 0.3)  # what the step that was left out drew
    rest = Fixed()
    rest.batches = stream.batches[1:]
    ((loss, perturbed, _),) = by_hand(calm, rest, 0.1, adaptive, epochs=1, seeded=True)
    for name, tensor in calm.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-12)
    assert result.rows[0]["perturbed_loss"] == pytest.approx(perturbed, rel=1e-6)
    assert scaled or result.rows[0]["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30], ids=["inf", "nan", "a norm that is too large"])
def test_a_gradient_that_is_not_finite_leads_nowhere(value):
    """So that losses there, and gradients of all processes, are no numbers either."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    parameters[0].grad, parameters[1].grad = torch.tensor([value, 1.0, 1.0]), torch.ones(2)
    with climbed([parameters], 0.1, adaptive=False):
        assert all(bool(p.isnan().all()) for p in parameters)
    assert all(bool((p == 1).all()) for p in parameters)


def test_a_run_that_never_is_finite_ends_and_keeps_its_weights():
    model = Net()
    spoil(model, set(range(1, 1000)))
    before = copied(model)
    with pytest.raises(DivergedError, match="10 steps in a row"):
        run(model, Fixed(*[4] * 12), Ascent(0.1))
    assert same(copied(model), before)


@pytest.mark.parametrize("factor", [2.0**-3, 2.0**10])
def test_a_loss_scaler_changes_no_bit(factor):
    plain, scaled = Net(), Net()
    run(plain, Fixed(6, 6), Ascent(0.1), accumulate=2)
    run(scaled, Fixed(6, 6), Ascent(0.1), Fp32(DynamicScaler("cpu", factor)), accumulate=2)
    assert same(copied(plain), copied(scaled))


def test_a_gradient_of_zeros_moves_nothing():
    model = Net(0.0, norm=False)
    nn.init.zeros_(model.head.weight)  # so that nothing before the head has a gradient
    model.head.requires_grad_(False)
    before = copied(model)
    run(model, Fixed(6), Ascent(0.1))
    assert same(copied(model), before)


def test_averages_and_the_optimiser_see_the_weights_after_the_descent():
    plain, averaged = Net(), Net()
    run(plain, Fixed(6, 6), Ascent(0.3))
    run(averaged, Fixed(6, 6), Ascent(0.3), ema=0.0)  # the average is the latest weights, and is what a run leaves
    assert same(copied(plain), copied(averaged))


def attn_vit(tiny, **kwargs):
    model = tiny(**kwargs)
    policy.apply(model, policy.select(model, "attn"))
    return model


def test_only_what_trains_climbs_and_frozen_tensors_keep_their_bits(tiny):
    model = attn_vit(tiny, drop_path_rate=0.2)
    before, seen = copied(model), []
    model.register_forward_pre_hook(lambda m, _: seen.append(copied(m)))
    run(model, Fixed(6, side=32, dtype=torch.float32), Ascent(0.1), epochs=1)
    first, second = seen
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    moved = {n for n in first if not torch.equal(first[n], second[n])}
    assert same(first, before) and moved <= trained and len(moved) >= len(trained) - 1
    distance = torch.stack([(second[n] - first[n]).norm() for n in trained]).norm()
    assert float(distance) == pytest.approx(0.1, rel=1e-5)
    assert all(torch.equal(model.state_dict()[n], before[n]) for n in before.keys() - trained)


def test_bf16_climbs_by_the_masters_and_casts_them_again(tiny):
    """Against functional calls with casts; the frozen weights are stored in 16 bits, the masters are not."""
    stream = Fixed(6, 6, side=32, dtype=torch.float32)
    ours, theirs = attn_vit(tiny), attn_vit(tiny)
    precision = Bf16()
    run(ours, stream, Ascent(0.05), precision, lr=1e-3, epochs=1, clip_grad=0.0)
    names = [n for n, p in theirs.named_parameters() if p.requires_grad]
    weights = [dict(theirs.named_parameters())[n] for n in names]
    frozen = {n: p.to(torch.bfloat16) for n, p in theirs.named_parameters() if n not in names}
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0)

    def gradients(at, images, labels):
        cast = {n: w.to(torch.bfloat16) for n, w in zip(names, at, strict=True)}
        logits = torch.func.functional_call(theirs, {**frozen, **cast}, (images.to(torch.bfloat16),))
        return torch.autograd.grad(nn.functional.cross_entropy(logits.float(), labels), at)

    for images, labels in stream.batches:
        first = gradients(weights, images, labels)
        norm = torch.stack([g.norm() for g in first]).norm()
        moved = [(w + 0.05 * g / norm).detach().requires_grad_() for w, g in zip(weights, first, strict=True)]
        for w, g in zip(weights, gradients(moved, images, labels), strict=True):
            w.grad = g
        optimizer.step()
    masters = precision.master_state_dict(ours)
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(masters[name], p.detach(), rtol=0, atol=2e-6, msg=name)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside of the context held at one time."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        self.most = max(self.most, self.now)
        return out

    def _freed(self, key):
        self.now -= self.live.pop(key, 0)


class Watched:
    """A rule whose memory is looked at before each update: an optimiser's own step needs more for a moment."""

    def __init__(self, rule, peak):
        self.rule, self.passes, self.peak, self.found = rule, rule.passes, peak, []

    def step(self, gradients, update):
        self.peak.most = self.peak.now

        def noted():
            self.found.append(self.peak.most)
            update()

        self.rule.step(gradients, noted)


@pytest.mark.parametrize(
    ("rule", "copies"),
    [(Ascent(0.1), 1), (Ascent(0.1, adaptive=True), 1), (Ascent(0.1, most=1), 2)],
    ids=["plain", "adaptive", "groups"],
)
def test_a_step_holds_one_copy_of_the_trained_weights_more_than_a_plain_one(rule, copies):
    """With groups also the sum of their gradients."""

    def peak(rule):
        model = nn.Sequential(nn.Flatten(), *[nn.Linear(48, 48) for _ in range(16)], nn.Linear(48, 3))
        with Peak() as found:
            watched = Watched(rule, found)
            run(model, Fixed(2, 2, dtype=torch.float32), watched, epochs=1)
        return watched.found[1], sum(p.numel() * 4 for p in model.parameters())

    (plain, weights), (ours, _) = peak(PlainStep()), peak(rule)
    assert 4 * weights <= plain < 4.3 * weights  # they, their gradients and AdamW's two moments
    assert (copies - 0.1) * weights < ours - plain <= (copies + 0.02) * weights


@pytest.mark.slow
def test_a_compiled_model_climbs_alike(monkeypatch):
    """Both passes run the compiled forward pass, which reads the weights anew."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    plain, ours = Net(), Net()
    run(plain, Fixed(6, 6), Ascent(0.3), epochs=1)
    run(ours, Fixed(6, 6), Ascent(0.3), epochs=1, compile=True)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)
