"""Benchmarks and document writers are scripts beside the packages: tests import them by their folders."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]
for _folder in ("benchmarks", "docs/_generate"):
    if str(REPO / _folder) not in sys.path:
        sys.path.append(str(REPO / _folder))


@pytest.fixture
def code() -> dict[str, str]:
    """What says where and by which code a row was measured."""
    return {"device": "card", "torch": "2.11.0", "triton": "3.6.0", "git": "abc", "date": "2026-01-01 00:00 UTC"}


@pytest.fixture(scope="session")
def kernels_stage() -> ModuleType:
    """The stage ``kernels`` without its plain name: that is also a package of others."""
    spec = importlib.util.spec_from_file_location("vtk_benchmark_kernels", REPO / "benchmarks" / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
