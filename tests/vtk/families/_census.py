"""Every architecture of timm's plain Vision Transformers, and which of vtk's engines take it.

An architecture is built on the meta device: shapes and classes decide, no values. Two have the same signature if their
blocks are built of the same classes with the same parameters, whatever the widths.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import timm
from timm.models import list_pretrained
from timm.models._registry import _model_entrypoints
from torch import nn

from vtk.bank import check_architecture
from vtk.errors import UsageError
from vtk.fused import fuse
from vtk.models.meta_model import shapes_only
from vtk.training.frozen_ffn.blocks import apply_memory_mode, remove_memory_mode
from vtk.training.policies import policy

MODULES = (
    "vision_transformer", "deit", "eva", "beit", "vision_transformer_relpos", "naflexvit", "vision_transformer_hybrid",
    "vision_transformer_sam", "levit",
)  # fmt: skip
"""Of `timm.models`: those whose models are stacks of blocks over one sequence of tokens."""

_SILENT = ("Dropout", "DropPath", "Identity", "Sequential", "ModuleList")


class Support(NamedTuple):
    """Why each engine refuses an architecture, or a part of the work; None where it takes it."""

    fuse: str | None
    bank: str | None
    memory: str | None

    @property
    def refusals(self) -> dict[str, str]:
        """Reasons by engine."""
        return {engine: why for engine, why in self._asdict().items() if why is not None}


def module_of(name: str) -> str:
    """Return the module of `timm.models` that an architecture is in."""
    return _model_entrypoints[name].__module__.rpartition(".")[2]


@functools.cache
def architectures() -> dict[str, int]:
    """Return the names of all architectures, module by module, each with how many sets of weights timm has for it."""
    counts = Counter(name.partition(".")[0] for name in list_pretrained())
    homes = {name: module_of(name) for name in _model_entrypoints}
    return {name: counts[name] for module in MODULES for name, home in homes.items() if home == module}


def blank(name: str, **kwargs: Any) -> nn.Module:
    """Return an architecture of three classes without values; by ``depth=1`` of one block where that can be."""
    with shapes_only():
        try:
            return timm.create_model(name, num_classes=3, **kwargs).eval()
        except (AssertionError, TypeError):  # LeViT's depth is one number a stage, Sapiens2 has heads block by block
            return timm.create_model(name, num_classes=3).eval()


def signature(model: Any) -> Hashable:
    """Return what an engine has to know of a model's blocks."""
    return type(model).__name__, frozenset(_of_block(block) for block in getattr(model, "blocks", ()))  # LeViT has none


def shorten(model: Any) -> Any:
    """Keep one block of each kind, the first, and return the model: the engines look at every block by itself."""
    if hasattr(model, "blocks"):
        kinds: dict[Hashable, nn.Module] = {}
        for block in model.blocks:
            kinds.setdefault(_of_block(block), block)
        model.blocks = type(model.blocks)(kinds.values()) if isinstance(model.blocks, nn.ModuleList) else (
            type(model.blocks)(*kinds.values())
        )  # fmt: skip
    return model


def ends(model: Any) -> Hashable:
    """Return what an engine has to know beside the blocks: stem, tables, tokens, pooling and head."""
    names = tuple(n for n, _ in model.named_parameters() if not n.startswith(("blocks.", "stages.")))
    parts = tuple(
        (n, type(m).__name__) for n, m in model.named_modules() if n and not n.startswith(("blocks.", "stages."))
    )
    flags = ("global_pool", "pool_include_prefix", "no_embed_class", "dynamic_img_size", "rope_mixed")
    return names, parts, tuple(getattr(model, flag, None) for flag in flags)


def _of_block(block: nn.Module) -> Hashable:
    attn: Any = getattr(block, "attn", None)
    grouped = getattr(attn, "num_kv_heads", None) not in (None, getattr(attn, "num_heads", None))
    parts = tuple((n, type(m).__name__) for n, m in block.named_modules() if type(m).__name__ not in _SILENT)
    return parts, tuple(n for n, _ in block.named_parameters()), getattr(attn, "rotate_half", None), grouped


def support(model: nn.Module) -> Support:
    """Return what `vtk.fuse`, `TaskBank` and ``--memory minimal`` say about a model."""
    return Support(*(_refusal(ask, model) for ask in (_fuse, check_architecture, _memory)))


def _fuse(model: nn.Module) -> None:
    fuse(model, keep_source=False)


def _memory(model: nn.Module) -> None:
    policy.apply(model, policy.select(model, "attn"))
    try:
        if note := apply_memory_mode(model, "minimal").note:
            raise UsageError(note)
    finally:
        remove_memory_mode(model)
        policy.apply(model, policy.select(model, "full"))


def _refusal(function: Callable[[Any], None], model: nn.Module) -> str | None:
    try:
        function(model)
    except UsageError as error:
        return str(error)
    return None
