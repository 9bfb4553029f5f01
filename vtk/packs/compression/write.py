"""Writes a compressed pack, and what was measured into its card."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtk.calibration import Calibration
from vtk.card import Card
from vtk.errors import VerificationError
from vtk.evaluation.temperature import LEAST_IMAGES, calibrate
from vtk.files import replace_dir
from vtk.packs.cards import pack_bytes
from vtk.packs.compression.compress import Compression
from vtk.packs.config import CompressConfig
from vtk.packs.load import load_task
from vtk.packs.pack import save_task

WEIGHTED = "mean squared change of the logits, per stored number"
UNWEIGHTED = "squared share of the matrix's change, per stored number"
"""Units of the squared threshold."""


@dataclasses.dataclass(frozen=True)
class Images:
    """Images that were measured on, for people and the card.

    Attributes:
        held: held-out images, in words; empty without any.
        trained: training images, in words; empty without any.
        same: the held-out images are exactly those of the training run, under its conditions, so that the card's
            metrics are those of an evaluation.
        conditions: precision, device and images per pass.
    """

    held: str = ""
    trained: str = ""
    same: bool = False
    conditions: str = ""


def write_compressed(path: Path, found: Compression, config: CompressConfig, images: Images, command: str) -> Card:
    """Write the pack, and read it back.

    Args:
        path: folder of the pack; replaced.
        found: what was compressed.
        config: of the command.
        images: that were measured on.
        command: for the card.

    Returns:
        The card as written.

    Raises:
        VerificationError: the pack reads back as other weights than were measured.
    """
    task = found.task
    state = {name: value.detach().cpu() for name, value in task.model.state_dict().items()}
    facts = {"compression": compression_facts(found, config, images)}
    metrics, calibration = new_metrics(found, images), new_calibration(found, images)
    card = dataclasses.replace(task.card.uncalibrated(), metrics=metrics, calibration=calibration, command=command)
    with replace_dir(path) as tmp:
        written = save_task(
            tmp, state=state, created=found.created, card=card, trained=task.card.pack.get("trained") or task.carried,
            dtype=config.pack_dtype, factors=found.factors, pack=facts,
        )  # fmt: skip
        _check_written(tmp, found, config)
    return written


def compression_facts(found: Compression, config: CompressConfig, images: Images) -> dict[str, Any]:
    """Return ``pack.compression`` of the card."""
    facts: dict[str, Any] = {
        "rank": config.rank, "mean_rank": found.mean_rank, "threshold": found.threshold,
        "unit": WEIGHTED if found.weighed else UNWEIGHTED, "errors": found.errors(),
        "positions": sorted(found.positions), "exact": sorted(found.changes.keys() - found.factors.keys()),
        "source_bytes": pack_bytes(found.task.path), "source_metrics": dict(found.task.card.metrics),
        "weighed": {"images": found.weighed, "what": images.trained} if found.weighed else None,
        "tuned": None, "chosen": None, "judged": None,
    }  # fmt: skip
    if found.tuned is not None:
        tuned = found.tuned
        facts["tuned"] = {"steps": tuned.steps, "images": tuned.images, "what": images.trained,
                          "kl_before": tuned.before, "kl_after": tuned.after}  # fmt: skip
    if found.chosen is not None and found.before is not None:
        facts["chosen"] = {"images": len(found.before) - found.judged.images if found.judged else 0,
                           "what": images.held, "seed": config.seed, "max_drop": config.max_drop / 100,
                           **{k: v for k, v in found.chosen.to_dict().items() if k != "mean_rank"}}  # fmt: skip
    if found.judged is not None:
        facts["judged"] = {**found.judged.to_dict(), "what": images.held, "conditions": images.conditions}
    return facts


def new_metrics(found: Compression, images: Images) -> dict[str, Any]:
    """Return the card's metrics: those of an evaluation of the compressed pack, or none."""
    if found.after is None or not images.same:
        return {}
    metrics = found.after.metrics()
    before = found.task.card.metrics
    return {**metrics.numbers(), "count": metrics.count, **({"epoch": before["epoch"]} if "epoch" in before else {})}


def new_calibration(found: Compression, images: Images) -> Calibration | None:
    """Return the calibration of the compressed pack, or None: the card's temperature is that of other logits."""
    after, halves = found.after, found.halves
    if after is None or halves is None or not all(halves) or not images.same or after.multi_label:
        return None
    if len(after) < LEAST_IMAGES or len(after.classes) < 2:
        return None
    return calibrate(after.logits.numpy(), after.labels.numpy(), *halves)


def _check_written(folder: Path, found: Compression, config: CompressConfig) -> None:
    """Read the pack as any other command does, and compare it with the weights that were measured."""
    measured: Mapping[str, Any] = found.task.model.state_dict()
    for name, value in load_task(folder, base=config.base).model.state_dict().items():
        mine = measured[name].detach().cpu()
        off = float((mine.double() - value.double()).abs().max()) if value.numel() else 0.0
        if off > 1e-6 * float(mine.double().abs().max()):
            raise VerificationError(f"`{name}` reads back {off:.1e} away from what was measured; nothing was written")
