"""A long table of cases: a few by default, the others among the slow tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Return the cases for ``parametrize``, marked slow but for those of ``default``."""
    listed = list(cases)
    assert all(case in listed for case in default), default
    return [case if case in default else pytest.param(case, marks=pytest.mark.slow) for case in listed]
