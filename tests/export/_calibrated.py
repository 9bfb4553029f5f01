"""A pack with a temperature, whose threshold divides known images."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.vtk.test_calibration import FITTED
from vtk.packs.cards import read_card
from vtk.packs.pack import update_card

IMAGES = torch.randn(16, 3, 32, 48, generator=torch.Generator().manual_seed(7))


def shares(model: Any, temperature: float = FITTED.temperature) -> np.ndarray:
    """Calibrated probabilities of `IMAGES`, fp64."""
    with torch.no_grad():
        return np.asarray((model.double()(IMAGES.double()) / temperature).softmax(1))


def calibrate(path: Path, model: Any) -> None:
    """Give a pack a table of 200 images: right above the median score of `IMAGES`, often wrong below it."""
    score = float(np.median(shares(model).max(1)))
    rows = {"scored": 200, "scores": (score, 0.0), "accepted": (120, 200), "errors": (0, 60)}
    update_card(path, dataclasses.replace(read_card(path), calibration=dataclasses.replace(FITTED, **rows)))
