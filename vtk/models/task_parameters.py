"""Names of the tensors that belong to the task, not to the shared base: classifier and position table."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

# absolute position tables of timm's families; relative-position tables live inside attention modules
_POSITION_LEAF = re.compile(
    r"pos_embed(_?\d+|_[xyhw]|_win|_window|_spatial|_temporal)?|position_embedding(_table)?|patch_pos|pixel_pos"
)


def head_names(model: nn.Module, keys: Iterable[str] | None = None) -> frozenset[str]:
    """Return the state-dict keys of the classifier or classifiers (a distilled model has two).

    Args:
        model: a timm model, which names its classifiers in ``pretrained_cfg["classifier"]``.
        keys: state-dict keys to choose from; by default the model's.
    """
    config: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    classifier = config.get("classifier") or "head"
    prefixes = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    names = model.state_dict().keys() if keys is None else keys
    return frozenset(k for k in names if any(k.startswith(f"{p}.") for p in prefixes))


def position_names(model: nn.Module, keys: Iterable[str] | None = None) -> frozenset[str]:
    """Return the state-dict keys of absolute position tables.

    Args:
        model: a timm model.
        keys: state-dict keys to choose from; by default the model's.
    """
    names = model.state_dict().keys() if keys is None else keys
    return frozenset(k for k in names if _POSITION_LEAF.fullmatch(k.rpartition(".")[2]))


def grid_of(model: nn.Module) -> tuple[int, int] | None:
    """Return height and width in patches of a model's token grid; None if it has none."""
    embed = getattr(model, "patch_embed", getattr(model, "pixel_embed", None))
    grid = getattr(embed, "grid_size", None)
    return None if grid is None else (int(grid[0]), int(grid[1]))


def feature_width(model: nn.Module) -> int:
    """Return the width of the features (B, C) that a timm model without classifier gives; 0 if it has none.

    Some networks (MobileNetV3, MambaOut, …) have a layer between their last map, of ``num_features`` channels, and the
    classifier, and keep it.
    """
    return int(getattr(model, "head_hidden_size", 0) or getattr(model, "num_features", 0) or 0)
