"""Benchmarks and document writers are scripts beside the packages: tests import them by their folders."""

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
for _folder in ("benchmarks", "docs"):
    if str(REPO / _folder) not in sys.path:
        sys.path.append(str(REPO / _folder))


@pytest.fixture
def code() -> dict[str, str]:
    """What says where and by which code a row was measured."""
    return {"device": "card", "torch": "2.11.0", "triton": "3.6.0", "git": "abc", "date": "2026-01-01 00:00 UTC"}
