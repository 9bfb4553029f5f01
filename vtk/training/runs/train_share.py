"""``--train-share``: a stratified fraction of the training images, of which each share contains every smaller one.

The images with the smallest hashes of (seed, name) are kept, class by class: the same ones on every machine, and an
added file moves few others. The seed is the run's, as that of the split: runs of several seeds differ by their images,
too, so that their spread is that of an experiment on so many images.
"""

import dataclasses
import hashlib
from collections import Counter
from typing import Any

import numpy as np

from vtk.data.audit.result import DataAudit
from vtk.data.record import name_below


def keep_share(audit: DataAudit, share: float, seed: int) -> DataAudit:
    """Return an audit with a fraction of the training images, and a note on it; held-out images stay.

    Every class keeps round(share × its images), at least one. An image with several labels counts for the rarest one of
    them; images without labels, as of masked pre-training, are one class.

    Args:
        audit: of all images.
        share: 0 < share ≤ 1; 1 leaves the audit as it is.
        seed: of the choice.
    """
    if share == 1:
        return audit
    groups: dict[int, list[int]] = {}
    for i, label in enumerate(_classes(audit)):
        groups.setdefault(label, []).append(i)
    names = [name_below(audit, sample.path).encode("utf-8", "surrogateescape") for sample in audit.train]
    keys = [hashlib.sha256(b"train share %d:%s" % (seed, name)).digest() for name in names]
    kept: set[int] = set()
    for group in groups.values():
        count = max(int(len(group) * share + 0.5), 1)
        kept.update(sorted(group, key=keys.__getitem__)[:count])
    train = tuple(sample for i, sample in enumerate(audit.train) if i in kept)
    stratified = f", stratified by {audit.noun[0]}" if audit.classes else ""
    used = f"{len(train)} of {len(audit.train)} training images are used"
    note = f"{used} (--train-share {share:g}{stratified}, seed {seed})"
    return dataclasses.replace(audit, train=train, train_share=share, notes=(*audit.notes, note))


def _classes(audit: DataAudit) -> list[int]:
    """Return the class of each training image; of several labels the rarest, and -1 without a label."""
    labels: list[Any] = [sample.label for sample in audit.train]
    own = [list(map(int, label.nonzero()[0])) if isinstance(label, np.ndarray) else [int(label)] for label in labels]
    counts = Counter(label for several in own for label in several)
    return [min(several, key=lambda label: (counts[label], label), default=-1) for several in own]
