"""Changes of a model that only a run from scratch may ask for: dropout rates, and the bias of a new classifier."""

from torch import nn

from vtk.errors import UsageError
from vtk.training.objectives.binary import set_head_bias
from vtk.training.options.scratch import ScratchOptions

_PLACES = {
    "drop": frozenset({"pos_drop", "proj_drop", "drop1", "drop2", "drop"}),
    "attn_drop": frozenset({"attn_drop"}),
}
"""timm's names of the modules: after the position table, after an attention's projection and inside of an `Mlp`, where
the first ViT has its dropout (Dosovitskiy et al. 2021, app. B.1); and of attention weights, where it has none."""


def set_dropout(model: nn.Module, *, drop: float, attn_drop: float) -> None:
    """Set the rates in place; 0 leaves a model as it is.

    Args:
        model: with the dropout modules that timm's layers have at any rate, 0 included.
        drop: of tokens.
        attn_drop: of attention weights.

    Raises:
        UsageError: the model has no such module.
    """
    for option, rate in (("drop", drop), ("attn_drop", attn_drop)):
        if not rate:
            continue
        named = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
        modules = [module for leaf, module in named if leaf in _PLACES[option] and isinstance(module, nn.Dropout)]
        if not modules:
            raise UsageError(
                f"`--{option.replace('_', '-')}` {rate:g}: {type(model).__name__} has no such dropout; leave it out"
            )
        for module in modules:
            module.p = rate


def apply_scratch(config: ScratchOptions, model: nn.Module, *, new_classifier: bool) -> None:
    """Set the dropout rates and, of a new classifier, the bias, in place.

    Raises:
        UsageError: the model has no such module.
    """
    set_dropout(model, drop=config.drop, attn_drop=config.attn_drop)
    if config.head_bias is not None and new_classifier:
        set_head_bias(model, config.head_bias)
