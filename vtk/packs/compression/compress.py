"""Cuts the changes of a pack's matrices to low rank, measures what that costs, and writes the smaller pack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk.errors import BaseError, UsageError
from vtk.models.create import Created
from vtk.models.task_parameters import position_names
from vtk.packs.base_files import base_keys
from vtk.packs.cards import read_hashes
from vtk.packs.compression.answers import Answers
from vtk.packs.compression.candidates import Candidate, Rule, pick, search
from vtk.packs.compression.changes import Change, changed_matrices, create_start, threshold_for
from vtk.packs.compression.drop import Comparison, DropMetric, compare, default_metric
from vtk.packs.compression.held_out import HeldOut, TrainingImages
from vtk.packs.compression.moments import BATCH, IMAGES, gradient_moments
from vtk.packs.compression.trial import Trial, mean_rank
from vtk.packs.compression.tune import BATCH as TUNE_BATCH
from vtk.packs.compression.tune import Tuned, tune
from vtk.packs.config import CompressConfig
from vtk.packs.factors import Factors
from vtk.packs.load import Task


@dataclass(frozen=True, eq=False)
class Compression:
    """A pack cut to low rank, and what was measured.

    Attributes:
        task: the pack, as it was loaded.
        created: its model as created from the base.
        factors: as they are stored.
        changes: of all matrices that could be cut; those not among ``factors`` stay exact.
        threshold: that the components of ``factors`` reach.
        candidates: that ``--rank auto`` measured, from the smallest to the largest; else empty.
        chosen: the one it chose.
        judged: the comparison with the full pack on images that chose nothing; None without held-out images.
        before: the full pack's answers on all held-out images.
        after: those of the compressed pack.
        weighed: training images whose gradients weigh the components; 0 for none.
        tuned: result of ``--tune``.
        halves: places of the held-out images that choose, and of those that judge.
    """

    task: Task
    created: Created
    factors: Mapping[str, Factors]
    changes: Mapping[str, Change]
    threshold: float
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    judged: Comparison | None
    before: Answers | None
    after: Answers | None
    weighed: int
    tuned: Tuned | None
    halves: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def positions(self) -> frozenset[str]:
        """Names of position tables among the changes."""
        return position_names(self.created.model) & self.changes.keys()

    @property
    def mean_rank(self) -> float:
        """Rank that would take as many numbers in every factored weight matrix."""
        return mean_rank(self.factors, self.changes, self.changes.keys() - self.positions)

    def errors(self) -> dict[str, float]:
        """Return ‖change − factors‖ / ‖change‖ of every factored matrix."""
        return {name: self.changes[name].error(f) for name, f in sorted(self.factors.items())}


def compress(
    task: Task, config: CompressConfig, *, held: HeldOut | None, training: TrainingImages | None, device: torch.device
) -> Compression:
    """Cut the changes of a pack's matrices to low rank; nothing is written.

    Args:
        task: the pack; its model is moved to ``device`` and holds the compressed weights afterwards.
        config: rank, bound, tuning and precision.
        held: held-out images; ``--rank auto`` needs them.
        training: training images; ``--tune`` needs them.
        device: of everything but the decompositions.

    Raises:
        UsageError: nothing to compress, or too few images.
        BaseError: the base has other values than the pack was trained from.
        VerificationError: no rank is within the bound.
    """
    created = create_start(task)
    whole = changed_matrices(task, created)
    _check_base(task, created, whole)
    if held is not None and config.rank == "auto":
        held.check_halves()
    model = task.model.to(device).eval()
    before = held.answers(model, "full pack") if held is not None else None
    sides: dict[str, tuple[Tensor, Tensor]] = {}
    weighed = min(IMAGES, len(training)) if training is not None else 0
    if training is not None:
        batches = training.some(IMAGES, BATCH)
        sides = gradient_moments(
            model, list(whole), batches, multi_label=task.card.multi_label, seed=config.seed, count=weighed
        )
    changes = {name: Change.of(change, sides.pop(name, None)) for name, change in whole.items()}  # frees the sides
    trial = Trial.of(model, created.model.state_dict(), changes, config.pack_dtype)
    metric = metric_of(config, task.card.multi_label)
    candidates: tuple[Candidate, ...] = ()
    chosen = None
    if config.rank == "auto":
        assert held is not None and before is not None
        rule = Rule(metric, config.max_drop / 100, few=len(held.choosing) * config.max_drop < 100)
        candidates = search(trial, held, before.of(held.choosing), rule, _others(task, whole))
        chosen = pick(candidates, rule, len(held.choosing))
        threshold = chosen.threshold
    else:
        threshold = threshold_for(changes, config.rank)
    factors, tuned = trial.cut(threshold), None
    if config.tune is not None and any(f.rank for f in factors.values()):
        assert training is not None
        tuned = tune(
            trial.restore(), trial.start, factors, training.endless(TUNE_BATCH), steps=config.tune,
            multi_label=task.card.multi_label,
        )  # fmt: skip
        factors = tuned.factors
    if not factors:
        raise UsageError(
            f"`--rank` {config.rank}: factors would take more bytes than the {len(changes)} matrices themselves; give "
            "a lower rank, or keep the pack as it is"
        )
    stored = trial.stored(factors)
    after = judged = None
    if held is not None and before is not None:
        after = held.answers(trial.show(stored), "compressed pack")
        # of a given rank, no held-out image chose anything: all of them judge
        places = held.judging if chosen is not None else range(len(before))
        judged = compare(before.of(places), after.of(places), metric)
    else:
        trial.show(stored)
    return Compression(
        task, created, stored, changes, threshold, candidates, chosen, judged, before, after, weighed, tuned,
        (held.choosing, held.judging) if held is not None else None,
    )  # fmt: skip


def metric_of(config: CompressConfig, multi_label: bool) -> DropMetric:
    """Return the metric that is compared.

    Raises:
        UsageError: it is not one of this kind of labels.
    """
    if config.metric == "auto":
        return default_metric(multi_label)
    if (config.metric == "mAP") != multi_label:
        known = "mAP" if multi_label else "top1 or balanced_accuracy"
        raise UsageError(f"`--metric` {config.metric} is not one of this pack's labels; give {known}")
    return config.metric


def _check_base(task: Task, created: Created, whole: Mapping[str, Tensor]) -> None:
    """Refuse a base of which the pack's own matrices started elsewhere: a pack does not need them, its factors do."""
    hashes, keys = read_hashes(task.path), base_keys(task.card, task.path)
    for name in whole:
        key = keys(name)
        if key in hashes and created.base.hashes.get(key) != hashes[key]:
            raise BaseError(
                f"`{key}` of the base found ({created.base.ref.source}) is not what {task.path} was trained from; give "
                "--base FILE"
            )


def _others(task: Task, whole: Mapping[str, Tensor]) -> int:
    """Return the bytes of the pack's tensors that are not cut."""
    state = task.model.state_dict()
    return sum(state[name].nbytes for name in task.carried if name not in whole)
