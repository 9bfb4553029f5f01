"""Small models with weights far from their initial values, so that no folded term is lost in a one or a zero."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

from vtk_kernels import choices


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a value that matters: norms and LayerScale near ½ ± 0.3, biases and tables near 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        centre = 0.5 if p.ndim == 1 and ("norm" in name or "gamma" in name) else 0.0
        spread = 0.3 if p.ndim == 1 else p.shape[-1] ** -0.5 if p.ndim == 2 else 0.1
        p.data = centre + spread * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model.double().eval()


@pytest.fixture
def vit() -> Callable[..., nn.Module]:
    """Return a factory of small fp64 Vision Transformers: ``vit(branches=2, dim=64, tokens=17, ...)``."""

    def build(*, branches: int | None = None, dim: int = 64, heads: int = 2, grid: int = 4, **kwargs: Any) -> nn.Module:
        if branches is not None:
            kwargs["block_fn"] = partial(ParallelThingsBlock, num_parallel=branches)
        arguments = {
            "img_size": 4 * grid, "patch_size": 4, "embed_dim": dim, "num_heads": heads, "depth": 2, "num_classes": 7,
            **kwargs,
        }  # fmt: skip
        return randomize(timm.create_model("vit_small_patch16_224", **arguments))

    return build


@pytest.fixture
def made_up_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Name every card as the module's ``CARD``, of which no table but the package's speaks."""
    monkeypatch.setattr(choices, "_name", lambda index: request.module.CARD)
    monkeypatch.delenv("VTK_CHOICES", raising=False)
    choices.use(None)
    yield
    monkeypatch.undo()
    choices.use(None)
