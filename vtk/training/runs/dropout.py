"""Dropout rates of a timm model, set after it was built, so that they are of training and of no card."""

from torch import nn

from vtk.errors import UsageError

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
        found = [module for leaf, module in named if leaf in _PLACES[option] and isinstance(module, nn.Dropout)]
        if not found:
            raise UsageError(
                f"`--{option.replace('_', '-')}` {rate:g}: {type(model).__name__} has no such dropout; leave it out"
            )
        for module in found:
            module.p = rate
