"""Calibrates a pack on held-out images after its training: temperature and scores go into its card."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtk import console
from vtk.calibration import Calibration
from vtk.data.cpus import usable_cpus
from vtk.errors import UsageError
from vtk.evaluation.temperature import LEAST_IMAGES, calibrate, describe
from vtk.models.devices import DTYPES, resolve_device
from vtk.options import expect
from vtk.packs.compression.held_out import HeldOut
from vtk.packs.config import CalibrateConfig
from vtk.packs.load import load_task
from vtk.packs.pack import update_card
from vtk.runtime.images import find_images
from vtk.runtime.run_conditions import choose_conditions
from vtk.runtime.source import Source

_FEW = 200


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated pack.

    Attributes:
        path: its folder.
        calibration: as written into its card.
        images: held-out images that were run.
        what: they are, in words.
    """

    path: Path
    calibration: Calibration
    images: int
    what: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "path": str(self.path), "images": self.images, "what": self.what,
            "calibration": dataclasses.asdict(self.calibration),
        }  # fmt: skip


def calibrate_task(config: CalibrateConfig) -> CalibrationResult:
    """Fit a pack's temperature on one half of held-out images, judge it on the other, and write both into its card.

    Its tensors stay as they are. Images that the run was trained on are left out.

    Raises:
        UsageError: a multi-label pack, one class, or too few images.
        DataError: the pack or the images cannot be used.
        BaseError: no base fits.
    """
    expect(config, CalibrateConfig, "calibrate_task")
    task = load_task(config.pack, base=config.base)
    card = task.card
    if card.multi_label or len(card.classes) < 2:
        kind = "multi-label" if card.multi_label else "of one class"
        raise UsageError(f"{config.pack} is {kind}: a temperature is for models of one label among several an image")
    source = Source("pack", task.path.name, task.path, card, held=task)
    conditions = choose_conditions(source, device=config.device)
    for note in conditions.notes:
        console.say(note)
    audit, part = find_images(source, config.data, "val")
    count = len(part.samples)
    workers = (min(usable_cpus(), 8) if count > _FEW else 0) if config.workers is None else config.workers
    device = resolve_device(conditions.device)
    held = HeldOut(
        card, part.samples, audit.digests, part.what, device=device, dtype=DTYPES[conditions.precision],
        batch_size=conditions.batch_size, workers=workers, seed=config.seed,
    )  # fmt: skip
    if count < LEAST_IMAGES or not (held.choosing and held.judging):
        raise UsageError(
            f"`--data` {config.data}: {count} {part.what}; a temperature takes {LEAST_IMAGES} different ones at least"
        )
    answers = held.answers(task.model.to(device).eval(), "calibrate")
    found = calibrate(answers.logits.numpy(), answers.labels.numpy(), held.choosing, held.judging)
    update_card(task.path, dataclasses.replace(card, calibration=found, threshold=None))
    console.say(describe(found))
    return CalibrationResult(task.path, found, count, part.what)
