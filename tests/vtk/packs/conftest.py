"""Small packs for the tests of their other forms."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from vtk.card import Card
from vtk.models.create import Created, build_model
from vtk.packs import save_task
from vtk.packs.synthetic import write_synthetic

NAME = "vit_tiny_patch16_224"
KWARGS: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 2}


@pytest.fixture(scope="session")
def small() -> tuple[str, dict[str, Any]]:
    """Name and arguments of the model."""
    return NAME, KWARGS


@pytest.fixture(scope="session")
def shared_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of `base_file`, for fixtures that outlive a test; not to be changed."""
    path = tmp_path_factory.mktemp("base") / "vit.safetensors"
    torch.manual_seed(1)
    save_file(timm.create_model(NAME, **KWARGS).state_dict(), path)
    return path


@pytest.fixture
def base_file(shared_base: Path, tmp_path: Path) -> Path:
    """Random base weights with a classifier for a thousand classes."""
    return Path(shutil.copyfile(shared_base, tmp_path / "vit.safetensors"))


@pytest.fixture
def make_pack(base_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return what makes a pack whose tensors were moved as training would."""
    return partial(write_small_pack, tmp_path, base_file)


@pytest.fixture(scope="session")
def shared_pack(shared_base: Path) -> Path:
    """A pack for tests that only read it."""
    return write_small_pack(shared_base.parent, shared_base)


def write_small_pack(
    folder: Path,
    weights: Path,
    name: str = "pack",
    *,
    moved: Callable[[str], bool] = lambda key: ".attn." in key or key.startswith(("pos_embed", "head")),
    step: float = 0.02,
    dtype: Any = "fp32",
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write a pack; ``options`` go to `build_model`."""
    if kwargs:
        weights = folder / f"{name}-base.safetensors"
        save_file(timm.create_model(NAME, **KWARGS, **kwargs).state_dict(), weights)
    options = {"num_classes": 3, "img_size": 32, "weights": weights, "kwargs": KWARGS | (kwargs or {})} | options
    created: Created = build_model(NAME, **options)
    state = created.model.state_dict()
    trained = {k for k in state if moved(k)} | {k for k, v in created.key_map.items() if v is None}
    with torch.no_grad():
        for key in sorted(trained):
            state[key] += step * torch.randn_like(state[key])
    classes = tuple(f"c{i}" for i in range(options["num_classes"]))
    card = Card(model=created.spec, input=created.input, classes=classes, metrics={"top1": 0.5})
    save_task(folder / name, state=state, created=created, card=card, trained=trained, dtype=dtype)
    return folder / name


@pytest.fixture
def make_factors(make_pack: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return what writes a pack of factors like the pack that the other arguments make."""

    def make(name: str = "factors", *, rank: Any = (3, 2, 0), dtype: Any = "fp32", **options: Any) -> Path:
        return write_synthetic(tmp_path / name, make_pack(f"{name}-full", **options), rank=rank, dtype=dtype)

    return make
