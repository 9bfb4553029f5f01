"""The loop against a bare PyTorch loop written here, and its accounting."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from vtk.errors import UsageError
from vtk.training.engine.fitting import DivergedError, fit
from vtk.training.engine.precision import Bf16, Fp32
from vtk.training.engine.step_plan import plan_steps
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy


class Fixed:
    """A stream of given batches, the same in every epoch."""

    def __init__(self, *sizes: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes = sizes
        self.batches = [(torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 3) for n in sizes]

    def epoch(self, index):
        for images, labels in self.batches:
            yield Batch(images.clone(), labels.clone())


def attn_vit(tiny, **kwargs):
    model = tiny(**kwargs)
    policy.apply(model, policy.select(model, "attn"))
    return model


def run(model, stream, precision=None, objective=None, **changes):
    config = FinetuneConfig(**{"epochs": 2, "lr": 1e-3, "head_lr_mult": 5.0, **changes})
    return fit(
        model, objective or Classification(3, smoothing=config.smoothing), [stream], config, precision or Fp32(),
        show_progress=False,
    )  # fmt: skip


def bare_loop(model, stream, *, epochs, lr, mult, decay, smoothing, clip, accumulate=1, warmup=0.1, cast=None):
    """AdamW with the recipe's groups, written without any of vtk's code."""
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            key = name.startswith("head"), p.ndim > 1 and name != "pos_embed"
            groups.setdefault(key, []).append(p)
    rates = {key: lr * (mult if key[0] else 1) for key in groups}
    order = sorted(groups)
    optimizer = torch.optim.AdamW([{"params": groups[k], "weight_decay": decay * k[1]} for k in order])
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = math.ceil(len(stream.batches) / accumulate)
    total, step, losses = epochs * steps, 0, []
    rising = round(warmup * total)
    model.train()
    for _ in range(epochs):
        for first in range(0, len(stream.batches), accumulate):
            group = stream.batches[first : first + accumulate]
            count = sum(len(y) for _, y in group)
            optimizer.zero_grad()
            value = 0.0
            for images, labels in group:
                logits = cast(model, images) if cast else model(images)
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
                (loss * len(labels) / count).backward()
                value += loss.item() * len(labels) / count
            torch.nn.utils.clip_grad_norm_(trained, clip)
            t = (step - rising) / max(1, total - rising)
            factor = (step + 1) / rising if step < rising else 0.5 * (1 + math.cos(math.pi * t))
            for group_, key in zip(optimizer.param_groups, order, strict=True):
                group_["lr"] = rates[key] * factor
            optimizer.step()
            losses.append(value)
            step += 1
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_a_bare_loop(tiny, accumulate):
    stream = Fixed(6, 6, 6, 6, 3)
    ours, theirs = attn_vit(tiny), attn_vit(tiny)
    losses = bare_loop(
        theirs, stream, epochs=2, lr=1e-3, mult=5.0, decay=0.05, smoothing=0.1, clip=0.5, accumulate=accumulate
    )
    result = run(ours, stream, accumulate=accumulate, clip_grad=0.5)
    half = len(losses) // 2
    sizes = [6, 6, 6, 6, 3] if accumulate == 1 else [12, 12, 3]
    for epoch, row in enumerate(result.rows):
        part = losses[epoch * half : (epoch + 1) * half]
        assert row["loss"] == pytest.approx(sum(v * n for v, n in zip(part, sizes, strict=True)) / 27, rel=1e-5)
    for name, p in theirs.named_parameters():
        assert torch.allclose(dict(ours.named_parameters())[name], p, atol=2e-6), name


def test_bf16_regime_equals_a_bare_loop_with_functional_call(tiny):
    stream = Fixed(6, 6, 3)

    def cast(model, images):
        weights = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
        return torch.func.functional_call(model, weights, (images.to(torch.bfloat16),))

    ours, theirs = attn_vit(tiny), attn_vit(tiny)
    bare_loop(theirs, stream, epochs=2, lr=1e-3, mult=5.0, decay=0.05, smoothing=0.1, clip=1.0, cast=cast)
    precision = Bf16()
    run(ours, stream, precision)
    masters = precision.master_state_dict(ours)
    for name, p in theirs.named_parameters():
        assert torch.allclose(masters[name], p, atol=2e-6), name


def test_frozen_tensors_and_buffers_stay_bit_equal_and_trained_ones_move(tiny):
    model = attn_vit(tiny, drop_path_rate=0.2)
    model.patch_embed.norm = torch.nn.BatchNorm1d(4)
    policy.apply(model, policy.select(model, "attn"))
    before = copy.deepcopy(model.state_dict())
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    run(model, Fixed(6, 6))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in trained), name


def test_accumulating_equals_one_large_batch(tiny):
    parts = Fixed(4, 4, 2)
    whole = Fixed(10)
    whole.batches = [tuple(torch.cat(t) for t in zip(*parts.batches, strict=True))]
    a, b = attn_vit(tiny), attn_vit(tiny)
    run(a, parts, accumulate=4, epochs=1, optimizer="sgd")
    run(b, whole, epochs=1, optimizer="sgd")
    for name, p in b.named_parameters():
        assert torch.allclose(dict(a.named_parameters())[name], p, atol=1e-6), name


@pytest.mark.parametrize("regime", [Fp32, Bf16])
def test_gradient_checkpointing_changes_nothing(tiny, regime):
    results = []
    for on in (False, True):
        model, precision = attn_vit(tiny, drop_path_rate=0.3), regime()
        run(model, Fixed(6, 6), precision, grad_checkpointing=on)
        results.append(precision.master_state_dict(model))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_same_seed_same_weights_and_another_seed_others(tiny):
    def weights(seed):
        model = attn_vit(tiny, drop_path_rate=0.5)
        torch.manual_seed(99 + seed)  # the caller's generator must not matter
        torch.randn(3)
        run(model, Fixed(8, 8), seed=seed, objective=Classification(3, mixup=0.8))
        return model.state_dict()

    a, b, c = weights(0), weights(0), weights(1)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["blocks.0.attn.qkv.weight"], c["blocks.0.attn.qkv.weight"])


class Twice:
    """A step rule that asks for the gradients twice, as SAM does."""

    passes = 2

    def __init__(self):
        self.losses = []

    def step(self, gradients, update):
        pair = float(gradients()), float(gradients())
        self.losses.append(pair)
        update()
        return torch.tensor(pair[0])


def test_a_step_rule_sees_the_same_mixed_batch_twice(tiny):
    rule = Twice()
    config = FinetuneConfig(epochs=1, accumulate=2)
    objective = Classification(3, mixup=0.8)
    result = fit(attn_vit(tiny), objective, [Fixed(4, 4, 2)], config, Fp32(), step_rule=rule, show_progress=False)
    assert len(rule.losses) == result.steps == 2
    assert all(first == second for first, second in rule.losses)


class Logged(Classification):
    def loss(self, model, batch):
        return super().loss(model, batch)[0], {"size": torch.tensor(float(len(batch.images))), "one": 1.0}


def test_what_an_objective_logs_is_the_mean_over_images(tiny):
    row = run(attn_vit(tiny), Fixed(6, 2), objective=Logged(3), epochs=1).rows[0]
    assert row["size"] == pytest.approx((6 * 6 + 2 * 2) / 8) and row["one"] == pytest.approx(1)


def test_streams_take_turns_in_proportion():
    plan = plan_steps([[8, 8, 8, 8], [5, 5]], 1)
    assert [stream for stream, _ in plan] == [0, 1, 0, 0, 1, 0]
    assert plan_steps([[8, 8, 3]], 2) == [(0, [8, 8]), (0, [3])]


def test_a_loss_that_is_not_finite_stops_with_one_line(tiny):
    model = attn_vit(tiny)
    with pytest.raises(
        DivergedError, match=r"loss or its gradients are not finite in .* steps .*epoch \d .* lower --lr"
    ) as info:
        run(model, Fixed(*[4] * 6), optimizer="sgd", lr=1e6, head_lr_mult=1e6, clip_grad=0.0, warmup=0.0)
    assert "\n" not in str(info.value)


def test_nothing_to_train_is_refused(tiny):
    model = tiny().requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        run(model, Fixed(4))


def test_a_model_without_checkpointing_is_refused():
    import timm

    model = timm.create_model("test_resnet", num_classes=3)
    model.set_grad_checkpointing = None
    with pytest.raises(UsageError, match="--grad-checkpointing"):
        run(model, Fixed(4), grad_checkpointing=True)


def test_stop_after_counts_from_where_the_run_stands(tiny):
    result = run(attn_vit(tiny), Fixed(4), epochs=5, stop_after=2)
    assert [row["epoch"] for row in result.rows] == [1, 2] and result.images == 8
