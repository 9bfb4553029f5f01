"""File names and functions that reading and writing PEFT adapters share."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.card import Card, InputSpec
from vtk.errors import UsageError
from vtk.packages import PACKAGES, importing
from vtk.packs.plain import PlainCall, plain_call

CONFIG, WEIGHTS, BASE, README = "adapter_config.json", "adapter_model.safetensors", "base.safetensors", "README.md"
CARD_KEY = "vtk_peft"
"""Metadata key of both files: the card, so that `vtk.packs.from_peft` needs no flags."""


def import_peft() -> Any:
    """Return the module ``peft``.

    Raises:
        UnavailableError: it is not installed.
    """
    with importing("PEFT cannot be used ({error}); " + PACKAGES["peft"].install):
        import peft
    return peft


def timm_call(card: Card) -> PlainCall:
    """Return the call that builds a card's model in plain timm; adapters are for such models only.

    Raises:
        UsageError: timm cannot build the model, for instance because of Context Broadcasting.
    """
    for transform in card.transforms:
        if transform.op not in ("parallelize", "adapt_input"):
            raise UsageError(
                f"the model has `{transform.op}`, which timm cannot build, so an adapter for PEFT would compute "
                "something else on timm's model; adapters are for models without it"
            )
    return plain_call(card)


def random_images(spec: InputSpec, count: int = 2) -> Tensor:
    """Return the same random images each time."""
    return torch.randn(count, spec.in_chans, *spec.size, generator=torch.Generator().manual_seed(0))


def put_adapter(peft: Any, model: nn.Module, folder: Path) -> Any:
    """Put an adapter on a model, in place, on the CPU; PEFT's warnings are suppressed, the caller checks the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu").eval()
