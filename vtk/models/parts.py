"""Which tensors of a timm model belong to the task (classifier, position table) and not to the shared base."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

# absolute position tables of timm's families; relative-position tables live inside attention modules
_POSITION_LEAVES = frozenset({"pos_embed", "pos_embed_x", "pos_embed_y", "pos_embed_h", "pos_embed_w",
                              "position_embedding", "pos_embed_win"})  # fmt: skip


def head_names(model: nn.Module, keys: Iterable[str] | None = None) -> frozenset[str]:
    """Return the state-dict keys of the classifier, or classifiers (a distilled model has two).

    Args:
        model: a timm model, which names its classifiers in ``pretrained_cfg["classifier"]``.
        keys: choose among these keys, by default the model's own.
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
        keys: choose among these keys, by default the model's own.
    """
    names = model.state_dict().keys() if keys is None else keys
    return frozenset(k for k in names if k.rpartition(".")[2] in _POSITION_LEAVES)
