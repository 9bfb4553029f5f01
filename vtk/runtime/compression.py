"""Compresses a pack: finds its base and its images, cuts it to low rank, measures, and writes it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.cpus import usable_cpus
from vtk.errors import DataError, UsageError
from vtk.models.devices import DTYPES, resolve_device
from vtk.options import expect
from vtk.packs.bundle import PACK_MARKS, claim_out
from vtk.packs.cards import pack_bytes
from vtk.packs.compression.compress import Compression, compress, metric_of
from vtk.packs.compression.held_out import HeldOut, TrainingImages
from vtk.packs.compression.report import describe, print_lines
from vtk.packs.compression.write import Images, write_compressed
from vtk.packs.config import CompressConfig
from vtk.packs.load import load_task
from vtk.runtime.data_parts import choose_part
from vtk.runtime.images import find_images
from vtk.runtime.run_conditions import Conditions, choose_conditions
from vtk.runtime.source import Source, pack_name

_FEW = 200


@dataclass(frozen=True, eq=False)
class CompressResult:
    """Result of `compress_task`.

    Attributes:
        path: folder of the compressed pack.
        card: as written; ``card.pack["compression"]`` has every number.
        found: factors, changes and answers.
        source_bytes: of the pack's files before.
        pack_bytes: of its files now.
        choosing: paths of the held-out images that chose the rank.
        judging: paths of those that judged it.
    """

    path: Path
    card: Card
    found: Compression
    source_bytes: int
    pack_bytes: int
    choosing: tuple[str, ...]
    judging: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        pack = self.card.pack
        return {
            "path": str(self.path), "source_bytes": self.source_bytes, "pack_bytes": self.pack_bytes,
            "tensors_bytes": pack["tensors_bytes"], "pack_dtype": pack["dtype"],
            "ranks": {name: fact["rank"] for name, fact in pack["factors"].items()},
            "candidates": [candidate.to_dict() for candidate in self.found.candidates],
            "choosing": list(self.choosing), "judging": list(self.judging), **pack["compression"],
        }  # fmt: skip


def compress_task(config: CompressConfig) -> CompressResult:
    """Store the changes of a pack's matrices as low-rank factors, and measure what that costs.

    Raises:
        UsageError: options that contradict the pack, nothing to compress, too few images, or ``out`` exists.
        DataError: the pack or the images cannot be used.
        BaseError: no base fits.
        VerificationError: no rank is within ``max_drop``.
    """
    expect(config, CompressConfig, "compress_task")
    with claim_out(config.out, PACK_MARKS, overwrite=config.overwrite):
        task = load_task(config.pack, base=config.base)
        if config.out.exists() and config.out.samefile(task.path):
            raise UsageError(f"`--out` {config.out} is the pack itself, which would be lost; choose another name")
        metric_of(config, task.card.multi_label)
        source = Source("pack", pack_name(task.path), task.path, task.card, held=task)
        conditions = choose_conditions(source, device=config.device)
        for note in conditions.notes:
            console.say(note)
        held, training, images = _find(source, config, conditions)
        found = compress(task, config, held=held, training=training, device=resolve_device(conditions.device))
        before = pack_bytes(task.path)
        card = write_compressed(config.out, found, config, images, _command(config))
    paths = [str(sample.path) for sample in held.samples] if held is not None else []
    halves: tuple[Sequence[int], Sequence[int]] = (), range(len(paths))
    if held is not None and found.chosen is not None:
        halves = held.choosing, held.judging
    chosen, judged = (tuple(paths[i] for i in half) for half in halves)
    result = CompressResult(config.out, card, found, before, pack_bytes(config.out), chosen, judged)
    print_lines(describe(found, config, images, card, result.source_bytes, result.pack_bytes))
    return result


def _find(
    source: Source, config: CompressConfig, conditions: Conditions
) -> tuple[HeldOut | None, TrainingImages | None, Images]:
    """Find the images of ``--data``; what the run held out judges, what it was trained on weighs and tunes."""
    if config.data is None:
        return None, None, Images()
    device = resolve_device(conditions.device)
    audit, part = find_images(source, config.data, "val")

    def workers(count: int) -> int:
        return (min(usable_cpus(), 8) if count > _FEW else 0) if config.workers is None else config.workers

    held = HeldOut(
        source.card, part.samples, audit.digests, part.what, device=device, dtype=DTYPES[conditions.precision],
        batch_size=conditions.batch_size, workers=workers(len(part.samples)), seed=config.seed,
    )  # fmt: skip
    training = None
    samples, what = _training_samples(source, config, audit, part.samples)
    if samples:
        training = TrainingImages(
            source.card, samples, what, device=device, workers=workers(len(samples)), seed=config.seed
        )
    elif config.tune is not None:
        why = "and all of those are copies of held-out ones" if what else f"and {config.data} has none"
        raise UsageError(f"`--tune` learns from training images, {why}; leave it out")
    else:
        console.say(f"{config.data} has no training images of its own: components are weighed by their size alone")
    ran = f"{conditions.precision} on {device.type}, {conditions.batch_size} images per pass"
    return held, training, Images(part.what, what, part.same and conditions.same, ran)


def _training_samples(
    source: Source, config: CompressConfig, audit: DataAudit, held: tuple[Sample, ...]
) -> tuple[tuple[Sample, ...], str]:
    """Return training images that are none of the held-out ones, and what they are in words."""
    assert config.data is not None
    try:
        part = choose_part(source.card, audit, config.data, "train")
    except DataError:
        return (), ""
    paths = {sample.path for sample in held}
    contents = {audit.digests.get(path) for path in paths} - {None, ""}
    others = tuple(s for s in part.samples if s.path not in paths and audit.digests.get(s.path) not in contents)
    return others, part.what


def _command(config: CompressConfig) -> str:
    words = ["vtk", "tasks", "compress", str(config.pack), "--rank", str(config.rank)]
    defaults = {"max_drop": 0.5, "metric": "auto", "tune": None, "pack_dtype": "bf16", "seed": 0, "data": None}
    for name, usual in defaults.items():
        value = getattr(config, name)
        if value != usual:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
