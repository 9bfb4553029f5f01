"""Each architecture that a bank holds, its blocks packed or folded, against the forward pass of timm's model."""

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from timm.models._registry import _model_entrypoints

from vtk.bank import check_architecture
from vtk.bank.architectures import without_blocks
from vtk.bank.folded import fold
from vtk.bank.fused_calls import FusedCall
from vtk.bank.grouped_weights import Slot
from vtk.bank.held_ends import HeldEnds
from vtk.bank.positions import Positions, read_positions
from vtk.bank.task_entry import Entry
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
def test_packed_and_folded_blocks_of_each_architecture_are_its_forward_pass() -> None:
    seen, folds, failed = 0, 0, []
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
            ways = {"folded": folded(copy.deepcopy(model), images), "packed": packed(model, images)}
        for way, found in ways.items():
            if found is not None and not (found - wanted).abs().max() <= 1e-12 * wanted.abs().max():
                failed.append((name, way, float((found - wanted).abs().max() / wanted.abs().max())))
        folds += ways["folded"] is not None
    assert not failed
    assert seen >= 200 and folds >= 180


def folded(model: Any, images: torch.Tensor) -> torch.Tensor | None:
    """Run a model as the one task of a folded bank; None if it cannot be folded."""
    try:
        folding = fold(model, (32, 32), torch.float64)
    except UsageError:
        return None
    shared, cpu, norm = folding.shared, torch.device("cpu"), model.norm
    assert shared is not None
    positions = Positions().change({}, cpu, torch.float64, "a", read_positions(model, (32, 32), torch.float64))
    end = without_blocks(model, norm=False)
    tokens = end.forward_features(images).shape[1]
    card: Any = SimpleNamespace(input=SimpleNamespace(size=(32, 32), in_chans=3))
    entry = Entry("a", card, Path(), 1, end, 0, tokens)
    ends = HeldEnds(cpu).add("a", folding.piece)
    call = FusedCall.of(shared, norm, ends, {"a": entry}, {"a": len(images)}, {1: Slot.whole(0)}, False, positions)
    layers = [{key: [t] for key, t in part.items()} for part in folding.weights]
    return call.run({"a": images}, layers, cpu, torch.float64)["a"]


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
