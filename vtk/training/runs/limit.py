"""``--limit N``: a subset of the images, for a trial run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vtk.data.audit.result import DataAudit, Sample
from vtk.data.loading.samplers import mix

_PARTS = {"train": 0x71, "val": 0x7A}


def limit_images(audit: DataAudit, limit: int | None, seed: int) -> DataAudit:
    """Return an audit with at most ``limit`` images of each part, drawn by the seed, and a note on it.

    Classes keep their proportions, and each has one image at least where there is room for all; images with several
    labels are drawn as they come.

    Args:
        audit: of all images.
        limit: None leaves it as it is.
        seed: of the choice.
    """
    if limit is None:
        return audit
    parts = {name: _some(getattr(audit, name), limit, mix(seed, number)) for name, number in _PARTS.items()}
    if all(len(part) == len(getattr(audit, name)) for name, part in parts.items()):
        return audit
    counts = [f"{len(part)} of {len(getattr(audit, name))}" for name, part in parts.items()]
    note = (
        f"a trial on {counts[0]} training images and {counts[1]} held-out ones (--limit {limit}): its numbers are of "
        "these alone"
    )
    return dataclasses.replace(audit, **parts, notes=(*audit.notes, note))  # type: ignore[arg-type]


def _some(samples: Sequence[Sample], limit: int, seed: int) -> tuple[Sample, ...]:
    if len(samples) <= limit:
        return tuple(samples)
    random = np.random.default_rng(seed)
    labels: list[Any] = [sample.label for sample in samples]
    groups = [np.arange(len(samples))]
    if all(isinstance(label, (int, np.integer)) for label in labels):
        groups = [np.flatnonzero(np.asarray(labels) == label) for label in np.unique(labels)]
    shares = _shares([len(group) for group in groups], limit, random)
    chosen = [random.permutation(group)[:share] for group, share in zip(groups, shares, strict=True)]
    return tuple(samples[i] for i in np.sort(np.concatenate(chosen)))


def _shares(sizes: Sequence[int], limit: int, random: np.random.Generator) -> list[int]:
    """Divide ``limit`` among groups in proportion to their sizes (largest remainders), one for each if it suffices."""
    counts = np.asarray(sizes)
    least = np.ones_like(counts) if limit >= len(counts) else np.zeros_like(counts)
    exact = counts * limit / counts.sum()
    shares = np.maximum(np.floor(exact).astype(int), least)
    order = random.permutation(len(counts))  # equal remainders are decided by chance
    while (over := int(shares.sum()) - limit) != 0:
        step = -1 if over > 0 else 1
        room = shares > least if over > 0 else shares < counts
        distance = np.where(room, step * (exact - shares), -np.inf)
        shares[order[int(np.argmax(distance[order]))]] += step
    return [int(share) for share in shares]
