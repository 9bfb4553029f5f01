"""The blocks of each architecture that a bank holds, packed, against the forward pass of timm's model."""

import warnings
from typing import Any

import pytest
import timm
import torch
from timm.models._registry import _model_entrypoints

from vtk.bank import check_architecture
from vtk.bank.architectures import without_blocks
from vtk.bank.positions import read_positions
from vtk.errors import UsageError
from vtk.models.packed.forward import RowPositions, Segments, attention_modules, own_weights, packed_forward

MODULES = (
    "beit", "deit", "eva", "levit", "naflexvit", "vision_transformer", "vision_transformer_hybrid",
    "vision_transformer_relpos", "vision_transformer_sam",
)  # fmt: skip
SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 2, "patch_size": 8}


def architectures() -> set[str]:
    """Names of timm's plain Vision Transformers that have weights."""
    names = {name.split(".")[0] for name in timm.list_pretrained()}
    return {n for n in names if _model_entrypoints[n].__module__.rpartition(".")[2] in MODULES}


def small(name: str) -> Any:
    """The architecture with few and narrow blocks."""
    kwargs = {**SMALL, "num_classes": 3}
    if "naflex" not in name:
        kwargs["img_size"] = 32
    if "sapiens2" in name:
        kwargs["num_kv_heads"] = (1, 2)
    if "mrope" in name or "genlip" in name:
        kwargs["embed_dim"] = 144
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_packed_blocks_of_each_architecture_are_its_forward_pass() -> None:
    seen, failed = 0, []
    for name in sorted(architectures()):
        try:
            model = small(name)
            check_architecture(model)
        except UsageError:
            continue
        except Exception:  # stems of convolutions, and sizes that an architecture does not take
            warnings.warn(f"{name} was not made small", stacklevel=1)
            continue
        seen += 1
        images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
        with torch.no_grad():
            wanted = model(images)
            found = packed(model, images)
        if not (found - wanted).abs().max() <= 1e-12 * wanted.abs().max():
            failed.append((name, float((found - wanted).abs().max() / wanted.abs().max())))
    assert not failed
    assert seen >= 200


def packed(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Run a model's blocks by `packed_forward`."""
    seen = read_positions(model, (32, 32), torch.float64)
    layers = [{k: t[None] for k, t in own_weights(attn).items()} for _, attn in attention_modules(model.blocks)]
    blocks, norm = list(model.blocks), model.norm
    tokens = without_blocks(model, norm=False).forward_features(images)
    batch, length = tokens.shape[:2]
    row = torch.arange(length, dtype=torch.int32).repeat(batch)
    bias = [] if seen.bias is None else [(batch, length, seen.bias)]
    x = packed_forward(
        blocks, layers, Segments.of([(0, batch, length)]), tokens.flatten(0, 1),
        positions=RowPositions(seen.rope, row, bias),
    )  # fmt: skip
    return model.forward_head(norm(x).unflatten(0, (batch, length)))
