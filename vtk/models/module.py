"""`vtk.create_model`: returns a timm model with the origin of its tensors as the attribute ``created``."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

from torch import nn

from vtk.card import InitName, InputSpec, Transform
from vtk.errors import UsageError
from vtk.models.arguments import refuse_none
from vtk.models.create import Created, build_model
from vtk.models.inputs import Size
from vtk.models.weights.base import Base

_OLD = frozenset(Created.__dataclass_fields__)
"""Attributes of what `create_model` returned in version 0.1."""


class CreatedModel(nn.Module):
    """A timm model (an instance of its timm class, too) with the origin of its tensors.

    Attributes:
        created: name, base, preprocessing, transforms and key map; not part of the state dict. Copying and pickling
            keep it; a copy shares the base.

    Version 0.1 returned that object itself: its attributes (``model``, ``base``, ``spec`` and others) are still
    available, with a warning, until the next release.
    """

    created: Created

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, or of ``created`` with a warning."""
        facts = self.__dict__.get("created")
        if name not in _OLD or facts is None or any(name in self.__dict__[kind] for kind in _REGISTERED):
            return super().__getattr__(name)
        new = "the model itself" if name == "model" else f"model.created.{name}"
        warnings.warn(
            f"`create_model` returns the model: in place of its `.{name}` use {new}", DeprecationWarning, stacklevel=2
        )
        return getattr(facts, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[type[nn.Module]], dict[str, Any]]:
        """Copy and pickle as an object of timm's class, since the subclass has no importable name."""
        return _empty, (type(self).__bases__[1],), self.__dict__


_REGISTERED = ("_parameters", "_buffers", "_modules")


def create_model(
    name: str,
    *,
    num_classes: int,
    img_size: Size = None,
    in_chans: int = 3,
    weights: Path | None = None,
    pretrained: bool = True,
    seed: int = 0,
    transforms: Sequence[Transform] = (),
    drop_path_rate: float = 0.0,
    kwargs: Mapping[str, Any] | None = None,
    base: Base | None = None,
    input: InputSpec | None = None,
    init: InitName = "papers",
) -> CreatedModel:
    """Build a timm model for a task, with base weights.

    Args:
        name: timm model name, or a parallel model's: ``vit_{tiny,small,base,large}_patch16_{N}x{P}_224``.
        num_classes: classes of the task; a classifier of another size is replaced.
        img_size: pixels, height first; by default the size of the weights.
        in_chans: input channels; other than 3 adapts the stem (transform ``adapt_input``).
        weights: file of base weights; by default from the hub.
        pretrained: False: random weights drawn from ``seed``.
        seed: random seed.
        transforms: transforms to apply, in order, after those in the file of the base.
        drop_path_rate: stochastic depth, in training.
        kwargs: further arguments of timm.
        base: loaded weights, in place of ``weights`` and ``pretrained``.
        input: preprocessing; by default that of the weights, at ``img_size``.
        init: initial weights of layers that are not timm's: ``papers``, or ``0.1`` as version 0.1 drew them from the
            same seed (`vtk.models.initialization`).

    Returns:
        The model: fp32, on the CPU, in train mode; (B, in_chans, height, width) to logits (B, num_classes).

    Raises:
        UsageError: unknown name, unsupported size or arguments, or an argument that is None.
        DataError: unreadable weights, or weights that do not fit.
    """
    if init not in get_args(InitName):
        raise UsageError(f"`init` is {init!r:.80}; allowed is {', '.join(get_args(InitName))}")
    if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or num_classes < 0:
        raise UsageError(
            f"`num_classes` is {num_classes!r:.80}; allowed is a whole number, 0 for a model without classifier"
        )
    refuse_none("kwargs", kwargs or {})
    created = build_model(
        name, num_classes=num_classes, img_size=img_size, in_chans=in_chans,
        weights=None if weights is None else Path(weights), pretrained=pretrained, seed=seed, transforms=transforms,
        drop_path_rate=drop_path_rate, kwargs=kwargs, base=base, input=input,
        init=init,
    )  # fmt: skip
    model: Any = created.model
    model.__class__ = _class_of(type(model))
    model.created = created
    return model  # type: ignore[no-any-return]


_classes: dict[type[nn.Module], type[CreatedModel]] = {}


def _class_of(kind: type[nn.Module]) -> type[CreatedModel]:
    """Return the cached subclass of ``kind`` with ``created``, under the same name."""
    if kind in _classes:
        return _classes[kind]
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return _classes.setdefault(kind, type(kind.__name__, (CreatedModel, kind), names))


def _empty(kind: type[nn.Module]) -> CreatedModel:
    """Return an object without attributes, for copy and pickle."""
    own = _class_of(kind)
    return own.__new__(own)
