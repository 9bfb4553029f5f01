"""A loss that is not a number: the step is left out as if it had not been, it is counted, and too many end the run."""

import json

import pytest
import torch
from torch import nn

from tests.vtk._faults import tree
from vtk.training.engine.fitting import fit
from vtk.training.engine.precision import Fp32
from vtk.training.engine.stepper import PATIENCE, DivergedError
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch, Classification

CALM = {"warmup": 0.0, "lr": 0.05, "head_lr_mult": 1.0, "min_lr": 1.0, "weight_decay": 0.1}


class Fixed:
    """The same batches in every epoch."""

    def __init__(self, batches):
        self.batches, self.sizes = batches, [len(b.images) for b in batches]

    def epoch(self, index):
        return iter(self.batches)


def batches(count):
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(torch.randn(4, 3, 4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(count)
    ]


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))


def run(model, parts, **changes):
    values = {"data": "x", "epochs": 1, "batch_size": 4, "smoothing": 0.0, **CALM, **changes}
    rows = []
    fit(model, Classification(3), [Fixed(parts)], FinetuneConfig(**values), Fp32(), show_progress=False,
        on_epoch=lambda end: rows.append(dict(end.row)) or {})  # fmt: skip
    return rows


@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_step_without_a_finite_gradient_never_was(clip, broken, monkeypatch):
    """Weights, momenta, statistics, learning rate and mean loss are those of a run that lacks the batch."""
    parts = batches(5)
    parts[2] = Batch(parts[2].images * broken, parts[2].labels)
    one, other = small(), small()
    # the broken batch takes one place in the schedule's total, which `min_lr` 1 keeps level
    (row,), (wanted,) = run(one, parts, clip_grad=clip), run(other, parts[:2] + parts[3:], clip_grad=clip)
    assert row["skipped_steps"] == 1.0 and "skipped_steps" not in wanted
    assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all(), name


def test_accumulated_batches_are_left_out_together():
    parts = batches(6)
    parts[2] = Batch(parts[2].images * float("nan"), parts[2].labels)
    one, other = small(), small()
    (row,), _ = run(one, parts, accumulate=2), run(other, parts[:2] + parts[4:], accumulate=2)
    assert row["skipped_steps"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_steps_in_a_row_end_the_run_and_single_ones_do_not():
    parts = batches(2 * PATIENCE + 4)
    for i in range(0, len(parts), 2):  # every other one, more than that many in all
        parts[i] = Batch(parts[i].images * float("nan"), parts[i].labels)
    (row,) = run(small(), parts)
    assert row["skipped_steps"] == len(parts) / 2 > PATIENCE
    for i in range(2, 2 + PATIENCE):
        parts[i] = Batch(parts[i].images * float("nan"), parts[i].labels)
    with pytest.raises(
        DivergedError, match=rf"not finite in {PATIENCE} steps in a row, in epoch 1 .*lower --lr"
    ) as info:
        run(small(), parts)
    assert "\n" not in str(info.value)


def test_an_epoch_without_a_step_ends_the_run():
    with pytest.raises(DivergedError, match=r"not finite in all steps of epoch 1 .*lower --lr"):
        run(small(), [Batch(b.images * float("nan"), b.labels) for b in batches(2)])


def test_skipped_steps_are_in_the_metrics_of_the_run(config, tmp_path, monkeypatch):
    real, seen = Classification.loss, []

    def explode(self, model, batch):
        seen.append(1)
        loss, logs = real(self, model, batch)
        return (loss * float("nan") if len(seen) == 3 else loss), logs

    monkeypatch.setattr(Classification, "loss", explode)
    result = finetune(config())
    rows = [json.loads(line) for line in (result.out / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["skipped_steps"] == 1.0 and rows[1].get("skipped_steps", 0.0) == 0.0
    assert all(row["loss"] > 0 for row in rows)


@pytest.mark.parametrize("where", ["held-out loss", "weights"])
def test_the_best_pack_is_never_one_that_is_not_a_number(config, tmp_path, monkeypatch, where):
    finetune(config(epochs=3, stop_after=1))
    before = {name: tree(tmp_path / "run" / name) for name in ("task", "last")}
    if where == "weights":  # as when memory fails: no gradient shows it before the evaluation
        from vtk.training.engine.precision import Fp32 as Regime

        def spoil(self, model):
            with torch.no_grad():
                model.pos_embed.fill_(float("nan"))

        monkeypatch.setattr(Regime, "before_eval", spoil)
    else:
        from vtk.evaluation import metrics

        real = metrics.F.cross_entropy
        monkeypatch.setattr(
            metrics.F, "cross_entropy",
            lambda logits, target, **k: real(logits, target, **k) * (float("nan") if "reduction" in k else 1.0),
        )  # fmt: skip
    with pytest.raises(DivergedError, match=r"the held-out loss is nan after epoch 2.*best pack, of epoch 1, is kept"):
        finetune(config(epochs=3, resume=True))
    assert {name: tree(tmp_path / "run" / name) for name in before} == before
