"""File names and functions that reading and writing PEFT adapters share."""

import re
import warnings
from collections.abc import Callable, Iterable
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
PREFIX = "base_model.model."
"""Before timm's names in an adapter's file."""


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


def called_leaves(model: nn.Module, spec: InputSpec) -> set[str]:
    """Return the modules without children that hold tensors and that a forward pass calls."""
    names = {m: n for n, m in model.named_modules() if n and not any(m.children()) and m.state_dict()}
    called: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.add(name)

    hooks = [module.register_forward_hook(note(name)) for module, name in names.items()]
    try:
        with torch.inference_mode():
            model(random_images(spec, 1))
    finally:
        for hook in hooks:
            hook.remove()
    return called


def exact_pattern(chosen: list[str], names: Iterable[str]) -> str:
    """Return a regular expression for exactly ``chosen`` among ``names``; numbers are joined where all are chosen."""
    others = set(names) - set(chosen)
    parts: dict[str, None] = {}
    for name in chosen:
        joined = re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name))
        exact = re.escape(name) if any(re.fullmatch(joined, other) for other in others) else joined
        parts[exact] = None
    return "|".join(parts)
