"""Renames tensors of deit's models (the code of Touvron et al. 2022) to timm's names."""

import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

_NAMES = {
    "norm1": "attns.0.norm", "attn": "attns.0.attn", "gamma_1": "attns.0.ls.gamma",
    "norm11": "attns.1.norm", "attn1": "attns.1.attn", "gamma_1_1": "attns.1.ls.gamma",
    "norm2": "ffns.0.norm", "mlp": "ffns.0.mlp", "gamma_2": "ffns.0.ls.gamma",
    "norm21": "ffns.1.norm", "mlp1": "ffns.1.mlp", "gamma_2_1": "ffns.1.ls.gamma",
}  # fmt: skip
_KEY = re.compile(r"(blocks\.\d+)\.(\w+)(.*)")
_SECOND = re.compile(r"blocks\.\d+\.(norm11|attn1|mlp1|norm21|gamma_1_1|gamma_2_1)\b")
_OWN = re.compile(r"blocks\.\d+\.gamma_[12]$")


def is_deit(keys: Iterable[str]) -> bool:
    """Return whether state-dict keys are those of deit's models: its LayerScale, or its second branch."""
    return any(_OWN.match(key) or _SECOND.match(key) for key in keys)


def rename_parallel(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename deit's two-branch blocks (``Layer_scale_init_Block_paralx2``, ``Block_paralx2``) to timm's parallel ones.

    A state dict without a second branch is unchanged.
    """
    if not any(_SECOND.match(key) for key in tensors):
        return dict(tensors)
    result = {}
    for key, value in tensors.items():
        match = _KEY.fullmatch(key)
        new = match and _NAMES.get(match[2])
        result[f"{match[1]}.{new}{match[3]}" if match and new else key] = value
    return result


def pad_position_table(tensors: dict[str, Tensor], model: nn.Module) -> bool:
    """Add a zero entry for the class token to deit's position table, which has none, if timm's model has one.

    deit adds the table to the patches before prepending the class token; timm's model adds it to both. With a zero
    entry they are equal.

    Args:
        tensors: weights of deit, changed in place.
        model: timm's model, whose table has the prefix entries.

    Returns:
        Whether the table was changed.
    """
    table, own = tensors.get("pos_embed"), getattr(model, "pos_embed", None)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if table is None or own is None or grid is None or table.ndim != 3 or own.ndim != 3:
        return False
    prefix = own.shape[1] - grid[0] * grid[1]
    # a table with the class token's entry has one row more than a square number
    if prefix < 1 or math.isqrt(table.shape[1]) ** 2 != table.shape[1]:
        return False
    tensors["pos_embed"] = torch.cat((table.new_zeros(1, prefix, table.shape[2]), table), 1)
    return True
