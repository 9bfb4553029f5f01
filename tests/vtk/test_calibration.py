"""Temperature and threshold of a card."""

import dataclasses
import json
from typing import Any

import pytest

from tests.vtk.test_card import CARD
from vtk.calibration import Calibration, Threshold
from vtk.card import Card
from vtk.errors import DataError

FITTED = Calibration(1.5, 500, 499, 0.6, 0.5, 0.05, 0.02, 0.03, 999, (0.9, 0.8), (20, 30), (0, 1))
GIVEN = Threshold(0.9, 0.02, 0.1, 999, 0.4, 0.0199)


def test_calibration_and_threshold_survive_json_where_older_readers_let_them_be() -> None:
    card = dataclasses.replace(CARD, calibration=FITTED, threshold=GIVEN)
    assert Card.from_json(card.to_json(), "here") == card
    assert card.temperature == 1.5 and CARD.temperature == card.uncalibrated().temperature == 1
    plain = json.loads(card.to_json())
    # readers before this field refuse a key that they do not know, except within these mappings of anything
    assert plain.keys() == json.loads(CARD.to_json()).keys()
    assert plain["metrics"]["calibration"]["temperature"] == 1.5 and plain["metrics"]["top1"] == 0.5


def test_a_card_without_calibration_is_written_as_before() -> None:
    assert "calibration" not in CARD.to_json() and "threshold" not in CARD.to_json()


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("calibration", {"temperature": 0.0}, "`calibration.temperature` is 0.0; it is from 0.01 to 100"),
        ("calibration", {"temperature": float("nan")}, "`calibration.temperature`"),
        ("calibration", {"temperature": "warm"}, "expected float"),
        ("calibration", {"heat": 1}, "unknown key `heat`"),
        ("calibration", {"ece_after": -1.0}, "negative or no number"),
        ("calibration", {"judged": -1}, "negative number of images"),
        ("calibration", {"errors": [0]}, "must have one length"),
        ("calibration", {"errors": [0, 40]}, "impossible"),
        ("calibration", {"scored": 25}, "impossible"),
        ("calibration", {"scores": [0.8, 0.9]}, "must fall"),
        ("calibration", {"errors": [1, 0]}, "must fall"),
        ("threshold", {"score": 2.0}, "share between 0 and 1"),
        ("threshold", {"risk": float("inf")}, "share between 0 and 1"),
        ("threshold", {"count": 0}, "no images"),
    ],
)
def test_an_impossible_calibration_or_threshold_is_refused(part: str, change: dict[str, Any], message: str) -> None:
    plain = json.loads(dataclasses.replace(CARD, calibration=FITTED, threshold=GIVEN).to_json())
    plain["metrics"][part] |= change
    with pytest.raises(DataError, match=message):
        Card.from_dict(plain, "here")


def test_a_multi_label_card_has_no_temperature() -> None:
    plain = dataclasses.replace(CARD, calibration=FITTED).to_dict() | {"multi_label": True}
    with pytest.raises(DataError, match="this one is multi-label"):
        Card.from_dict(plain, "here")
