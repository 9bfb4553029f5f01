"""Parallel Vision Transformers by name (Touvron et al. 2022, eq. 2): ``vit_small_patch16_12x3_224`` is 12 × 3 blocks.

timm has two of them (18x2, small and base) and a sequential one (36x1). Importing this module registers the paper's
other shapes in timm; further ones are registered on first use. All are timm's `VisionTransformer` with
`ParallelThingsBlock`, so their state-dict keys are timm's.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from timm.layers import LayerScale
from timm.models import build_model_with_cfg, generate_default_cfgs, get_pretrained_cfg, register_model
from timm.models.vision_transformer import Block, ParallelThingsBlock, VisionTransformer, checkpoint_filter_fn
from torch import nn

from vtk.card import ModelSpec
from vtk.errors import UsageError
from vtk.models import lvvit as _lvvit  # noqa: F401 - registers LV-ViTs in timm
from vtk.models.alternet import names as _alternet  # noqa: F401 - registers AlterNets in timm
from vtk.models.initialization.draw import reset_tensor

SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16)}
"""Width and heads by size, as in timm's ``vit_*_patch16_224``."""

SHAPES = ((6, 2), (12, 2), (12, 3), (9, 4))
"""(blocks, branches) registered in timm when this module is imported."""

INIT_VALUES = 1e-5
"""Argument of timm's 18x2 and 36x1; `build` draws LayerScale by the table of `vtk.models.initialization`."""

MOST = 256
"""Most residual pairs (blocks × branches) of a name; the paper's largest model has 60."""

_NAME = re.compile(r"vit_(tiny|small|base|large)_patch16_(\d{1,9})x(\d{1,9})_224")
_NEAR = re.compile(r"(vit|deit)_.*\d+x\d+.*")
_RULE = "parallel models are called vit_{tiny,small,base,large}_patch16_{N}x{P}_224, N blocks of P branches"

# timm's `register_model` reads this table and `__all__` of the module of each entry point
default_cfgs: dict[str, Any] = {}
__all__ = ["INIT_VALUES", "SHAPES", "SIZES", "build", "is_ours", "name_hint", "parallel_spec", "parse", "register"]


def parse(name: str) -> tuple[str, int, int] | None:
    """Return (size, blocks, branches) of a parallel model's name, None for any other name; a tag is ignored."""
    match = _NAME.fullmatch(name.split(".")[0])
    return (match[1], int(match[2]), int(match[3])) if match else None


def register(name: str) -> None:
    """Register ``name`` in timm if it is a parallel model that timm does not have; ignore other names.

    Raises:
        UsageError: unsupported numbers of blocks and branches.
    """
    arch = name.split(".")[0]
    shape = parse(arch)
    if shape is None or timm.is_model(arch):
        return
    size, depth, branches = shape
    if not (depth and branches and depth * branches <= MOST) or arch != _spell(size, depth, branches):
        raise UsageError(
            f"`{name}`: {depth} blocks of {branches} branches; give at least 1 of each, blocks × branches at most "
            f"{MOST}, without leading zeros"
        )
    _register(size, depth, branches)


def is_ours(name: str) -> bool:
    """Return whether timm has a parallel model's name only through this module."""
    register(name)
    return name.split(".")[0] in default_cfgs


def build(name: str, **kwargs: Any) -> nn.Module:
    """Return ``timm.create_model(name, **kwargs)``, parallel models of any shape included.

    LayerScale of a parallel model starts from the DeiT code's value, unless ``init_values`` is given.
    """
    register(name)
    model = timm.create_model(name, **kwargs)
    if parse(name) is not None and "init_values" not in kwargs and not kwargs.get("pretrained"):
        for module in model.modules():
            if isinstance(module, LayerScale):
                reset_tensor(module.gamma, "parallel.layer_scale")
    return model


def parallel_spec(spec: ModelSpec, depth: int, branches: int) -> ModelSpec | None:
    """Return name and arguments of a sequential model after `parallelize`; None if there are none.

    Args:
        spec: of the sequential model.
        depth: its number of blocks.
        branches: P, which divides ``depth``.
    """
    plain = re.fullmatch(r"vit_(tiny|small|base|large)_patch16_(224|384)", spec.name.split(".")[0])
    shape = parse(spec.name)
    if plain is None and (shape is None or shape[2] != 1):
        return None
    size = plain[1] if plain else shape[0]  # type: ignore[index]
    # 0 means no LayerScale; timm drops arguments that are None
    first = 0.0 if plain else INIT_VALUES
    kwargs = {"init_values": first, **{k: v for k, v in spec.kwargs.items() if k != "depth" and v is not None}}
    if kwargs["init_values"] == INIT_VALUES:
        del kwargs["init_values"]
    return ModelSpec(_spell(size, depth // branches, branches), kwargs)


def name_hint(name: str) -> str | None:
    """Return the rule of parallel models' names if ``name`` resembles one; else None."""
    if not _NEAR.fullmatch(name):
        return None
    return f"{_RULE}; another image size is --img-size, another patch size --model-kwargs patch_size=14"


def _spell(size: str, depth: int, branches: int) -> str:
    return f"vit_{size}_patch16_{depth}x{branches}_224"


def _register(size: str, depth: int, branches: int) -> None:
    name = _spell(size, depth, branches)
    cfg = get_pretrained_cfg("vit_small_patch16_18x2_224")
    assert cfg is not None
    blank = dataclasses.replace(cfg, architecture=None, tag=None)
    default_cfgs.update(generate_default_cfgs({f"{name}.untrained": blank}))
    globals()[name] = register_model(_entry_point(name, size, depth, branches))  # `__all__` names it


def _entry_point(name: str, size: str, depth: int, branches: int) -> Callable[..., nn.Module]:
    width, heads = SIZES[size]
    block = partial(ParallelThingsBlock, num_parallel=branches) if branches > 1 else Block

    def entry_point(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        arguments: dict[str, Any] = {
            "patch_size": 16, "embed_dim": width, "depth": depth, "num_heads": heads, "init_values": INIT_VALUES,
            "block_fn": block, **kwargs,
        }  # fmt: skip
        features = {"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"}
        return build_model_with_cfg(
            VisionTransformer, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=features,
            **arguments,
        )  # fmt: skip

    entry_point.__name__ = entry_point.__qualname__ = name
    entry_point.__doc__ = f"ViT-{size} of {depth} × {branches} parallel blocks with LayerScale (Touvron et al. 2022)."
    return entry_point


for _size in SIZES:
    for _depth, _branches in SHAPES:
        _register(_size, _depth, _branches)
