"""Names of the stems; without torch, since flags are made of them.

Paper E names its ablations by their parts (its Table 2): three convolutions, each with a BatchNorm (BN) and a ReLU
where the name has them, then the projection (Proj), then what comes after it. ``conv`` is short for all of them.
"""

from typing import Literal, get_args

StemName = Literal[
    "hmlp", "hmlp-ln", "conv", "3conv+3bn+3relu+1proj", "3conv+3bn+1proj", "3conv+3relu+1proj", "3conv+1proj",
    "3conv+1proj+1relu", "1proj+1bn+1relu", "1proj+1bn", "1proj+1relu", "1proj", "levit", "levit-ln",
]  # fmt: skip
STEMS: tuple[StemName, ...] = get_args(StemName)
"""Every stem: of paper A (``hmlp…``, ``1proj+1bn``; ``levit…``, which it compares with) and of paper E (the others)."""

PLAIN: StemName = "1proj"
"""The stem that every Vision Transformer has by itself."""

PATCHWISE: frozenset[StemName] = frozenset(name for name in STEMS if name.startswith(("hmlp", "1proj")))
"""Stems in which a token depends on its own patch only, so that masking can come before or after them.

With BatchNorm that holds in eval mode: in train mode its statistics join the patches of a batch.
"""

ActivationName = Literal["relu", "gelu", "hardswish", "scaled-relu"]
ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)


def parts(stem: StemName) -> tuple[str, ...]:
    """Return the parts of one of paper E's stems, such as ``("3conv", "3bn", "1proj")``; none for another stem."""
    full = "3conv+3bn+3relu+1proj" if stem == "conv" else stem
    return tuple(full.split("+")) if "1proj" in full else ()


def default_activation(stem: StemName) -> ActivationName | None:
    """Return the activation that the papers give a stem, None where it has none.

    LeViT's own is Hardswish; paper A compares with GELU in its place (its Table 7), and so does ``levit`` here.
    """
    made = parts(stem)
    if not made:
        return "gelu"
    return "relu" if {"3relu", "1relu"} & set(made) else None
