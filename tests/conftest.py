"""Fixtures that every test may use."""

import gc
import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

# Triton decides at decoration time, so this comes before any kernel is imported; on a CUDA machine kernels really run
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from vtk import console

pytest_plugins = ["tests._long", "tests._parts", "tests._simulated_cuda"]
REPO = Path(__file__).resolve().parents[1]
# the server and its clients are in an environment of their own (make test-server)
collect_ignore = [] if importlib.util.find_spec("pytriton") else ["server"]
ASSETS = Path(os.environ.get("VTK_ASSETS") or REPO.parent / "shared" / "assets")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (ASSETS / "dinov2_vits14_fp16.safetensors").exists() and (ASSETS / "cifar10-mini" / "train").is_dir():
        return
    for item in items:
        if "assets" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="the real weights and photographs are not here (VTK_ASSETS)"))


def pytest_collection_finish() -> None:
    """Let later collections of garbage leave out what is there for good: libraries and tests, a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def assets() -> Path:
    """Folder with dinov2_vits14_fp16.safetensors and cifar10-mini/{train,val}."""
    return ASSETS


@pytest.fixture(autouse=True)
def _seeded_and_single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # a command that is called without `vtk.__main__` leaves its --json behind
    monkeypatch.setattr(console, "_json_mode", False)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files need not outlive a power cut here; waiting for the disk was a fifth of the time of a small run."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # numbered here: `mktemp` looks at all earlier folders each time, and there are thousands
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def vtk_home(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh $VTK_HOME for every test, so that no test finds another's bases."""
    home = next(_homes)
    home.mkdir()
    monkeypatch.setenv("VTK_HOME", str(home))
    return home
