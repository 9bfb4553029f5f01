"""Architectures that a bank holds: families of timm's models, and which of their tensors are the task's."""

from typing import Any

import timm.models.beit as beit
import timm.models.deit as deit
import timm.models.eva as eva
import timm.models.naflexvit as naflexvit
import timm.models.vision_transformer as vit
import timm.models.vision_transformer_relpos as relpos
from torch import nn

from vtk.errors import UsageError
from vtk.models.packed.forward import attention_modules, own_parameters
from vtk.models.task_parameters import head_names, position_names

_FORWARDS = ("forward", "forward_features", "forward_head")
_FAMILIES: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (deit.VisionTransformerDistilled, ("_pos_embed", "pool")),
    (vit.VisionTransformer, ("_pos_embed", "pool")),
    (eva.Eva, ("_pos_embed", "pool")),
    (beit.Beit, ()),
    (relpos.VisionTransformerRelPos, ()),
    (naflexvit.NaFlexVit, ("_forward_embeds", "_pool")),
)
"""Classes, the more special ones first, with what their forward pass calls beside `_FORWARDS`."""
_KNOWN = "VisionTransformer (vit_*, deit_*, deit3_*), Eva, Beit, VisionTransformerRelPos and NaFlexVit"
_TOKENS = ("cls_token", "reg_token", "mask_token", "dist_token")
SEEN_BY_ATTENTION = ("rope", "rel_pos_bias", "shared_rel_pos")
"""Parts outside the blocks that tell attention the positions of tokens."""
ALONE = "serve it as a separate model"


def check_architecture(model: Any, what: object = "the model") -> None:
    """Refuse a model that a bank cannot run; its tensors are not read and may be on the meta device.

    Args:
        model: of timm.
        what: its name in messages.

    Raises:
        UsageError: another architecture or an unknown part, by name.
    """
    kind = type(model)
    family = next(((known, names) for known, names in _FAMILIES if isinstance(model, known)), None)
    if family is None or type(model.blocks) not in (nn.Sequential, nn.ModuleList):
        raise UsageError(f"{what} is a {kind.__name__}; a bank holds timm's {_KNOWN}; {ALONE}")
    for name in (*_FORWARDS, *family[1]):
        if getattr(kind, name) is not getattr(family[0], name):
            raise UsageError(f"{what} is a {kind.__name__}, whose `{name}` is its own; {ALONE}")
    attention_modules(model.blocks)


def own_keys(model: Any) -> frozenset[str]:
    """Return the state-dict keys that each task has for itself.

    They are attention's, the classifier's, absolute and relative positions, learned rotary frequencies, and the tokens
    that are no patches.
    """
    attention = {f"{name}.{p}" for name, attn in attention_modules(model.blocks) for p in own_parameters(attn)}
    parts = tuple(f"{part}." for part in ("attn_pool", *SEEN_BY_ATTENTION))
    found = {k for k in model.state_dict() if k.startswith(parts) or k.rpartition(".")[2] in _TOKENS}
    return frozenset(attention | found) | head_names(model) | position_names(model)


def without_blocks(model: Any, *, norm: bool = True) -> Any:
    """Take the blocks off a model, in place, and what only they read, and return it.

    Args:
        model: of a known family; what `forward_features` returns is then what its first block read.
        norm: whether the norm after the blocks stays.
    """
    model.blocks = type(model.blocks)()
    model.grad_checkpointing = False
    for name in SEEN_BY_ATTENTION:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)
    if not norm:
        model.norm = nn.Identity()
    return model
