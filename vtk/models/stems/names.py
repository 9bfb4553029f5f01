"""Names of the stems, for options; imports no torch.

Wang et al. 2022 name ablations by their parts (Table 2): three convolutions, each with BatchNorm (BN) and ReLU if in
the name, then the projection (Proj) and layers after it. ``conv`` is short for all of them.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from vtk.errors import UsageError

StemName = Literal[
    "hmlp", "hmlp-ln", "conv", "3conv+3bn+3relu+1proj", "3conv+3bn+1proj", "3conv+3relu+1proj", "3conv+1proj",
    "3conv+1proj+1relu", "1proj+1bn+1relu", "1proj+1bn", "1proj+1relu", "1proj", "levit", "levit-ln",
    "local-transformer",
]  # fmt: skip
STEMS: tuple[StemName, ...] = get_args(StemName)
"""All stems: of Touvron et al. 2022 (``hmlp…``, ``1proj+1bn``; for comparison ``levit…``, ``local-transformer``) and of
Wang et al. 2022."""

PLAIN: StemName = "1proj"
"""The usual stem of a Vision Transformer."""

LOCAL: StemName = "local-transformer"
"""The stem that has a number of layers."""

PATCHWISE: frozenset[StemName] = frozenset(name for name in STEMS if name.startswith(("hmlp", "1proj")))
"""Stems in which a token depends only on its own patch, so that masking before and after them is equivalent.

With BatchNorm this holds in eval mode only: in train mode its statistics depend on all patches of a batch.
"""

ActivationName = Literal["relu", "gelu", "hardswish", "scaled-relu"]
ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)


def parts(stem: StemName) -> tuple[str, ...]:
    """Return the parts of a stem of Wang et al. 2022, such as ``("3conv", "3bn", "1proj")``; empty for another stem."""
    full = "3conv+3bn+3relu+1proj" if stem == "conv" else stem
    return tuple(full.split("+")) if "1proj" in full else ()


def default_activation(stem: StemName) -> ActivationName | None:
    """Return the activation of a stem in its paper; None if it has none.

    LeViT's own is Hardswish; Touvron et al. 2022 (Table 7) use GELU, and so does ``levit`` here.
    """
    own = parts(stem)
    if not own:
        return "gelu"
    return "relu" if {"3relu", "1relu"} & set(own) else None


def check_arguments(stem: StemName, act: str | None, strides: Sequence[int] | None, depth: int | None) -> None:
    """Refuse arguments that a stem does not have; None is not given.

    Raises:
        UsageError: names the flag.
    """
    if act is not None and default_activation(stem) is None:
        raise UsageError(f"`--stem-act` {act}: --stem {stem} has no activation; leave it out")
    if depth is not None and stem != LOCAL:
        raise UsageError(f"`--stem-depth` needs --stem {LOCAL}; --stem {stem} has fixed layers, leave it out")
    if strides is None or "3conv" in parts(stem):
        return
    if parts(stem):
        raise UsageError(f"`--stem-strides` needs a stem with convolutions; --stem {stem} has none, leave it out")
    raise UsageError(f"`--stem-strides` needs a conv stem; --stem {stem} has fixed strides, leave it out")
