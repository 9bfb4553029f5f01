"""The table of long tests names tests that are there, and leaves the cases that it says."""

import re
from pathlib import Path

import pytest

from tests._long import KEPT, chosen

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("count", "kept", "found"), [(7, 3, {0, 3, 6}), (2, 5, {0, 1}), (4, 1, {0}), (4, 0, set()), (1, 3, {0})]
)
def test_what_stays_is_spread_over_the_table(count: int, kept: int, found: set[int]) -> None:
    assert chosen(count, kept) == found


def test_every_name_is_a_test() -> None:
    for name in KEPT:
        file, _, test = name.partition("::")
        text = (REPO / file).read_text("utf-8")
        assert not test or re.search(rf"^(async )?def {test}\(", text, re.M), name
