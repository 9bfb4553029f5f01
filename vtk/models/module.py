"""``vtk.create_model``: a timm model, which is a module and nothing else, with where it came from as an attribute."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from vtk.card import InputSpec, Transform
from vtk.errors import UsageError
from vtk.models.create import Created, build_model
from vtk.models.inputs import Size
from vtk.models.weights.base import Base

_OLD = frozenset(Created.__dataclass_fields__)
"""Attributes of what `create_model` returned in version 0.1."""


class CreatedModel(nn.Module):
    """A timm model of its own class (it is an instance of that, too) that remembers where its tensors came from.

    Attributes:
        created: the facts: name, base, preprocessing, transforms, names in the base. No part of the state dict. Copying
            or pickling the model keeps them; a copy shares the base.

    In version 0.1 the facts themselves were returned: their names (``model``, ``base``, ``spec`` and the others) are
    still there, with a warning, until the next release.
    """

    created: Created

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, of the facts where only they have it."""
        facts = self.__dict__.get("created")
        if name not in _OLD or facts is None or any(name in self.__dict__[kind] for kind in _REGISTERED):
            return super().__getattr__(name)
        new = "the model itself" if name == "model" else f"model.created.{name}"
        warnings.warn(
            f"`create_model` returns the model: in place of its `.{name}` use {new}", DeprecationWarning, stacklevel=2
        )
        return getattr(facts, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[type[nn.Module]], dict[str, Any]]:
        """Copy and pickle as an object of timm's class: the class made here has no place where it could be found."""
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
) -> CreatedModel:
    """Build a timm model for a task and fill it with base weights.

    Args:
        name: timm model name, or any ``vit_{tiny,small,base,large}_patch16_{N}x{P}_224``
            (`vtk.models.parallel_models`).
        num_classes: of the task; a classifier of another size is replaced.
        img_size: pixels, height first; by default what the weights were trained at.
        in_chans: channels; other than 3 adapts the stem (transform ``adapt_input``).
        weights: file with the base; by default the hub's.
        pretrained: False starts from random numbers drawn from ``seed``.
        seed: of everything drawn at random here.
        transforms: further changes, in order. What the file of the base was made with is done first in any case.
        drop_path_rate: stochastic depth, for training only.
        kwargs: further arguments for timm.
        base: weights already read; takes the place of ``weights`` and ``pretrained``.
        input: preprocessing, by default the weights' own at ``img_size``.

    Returns:
        The model: fp32, on the CPU, in train mode; (B, in_chans, height, width) to logits (B, num_classes).

    Raises:
        UsageError: unknown name, impossible size or arguments.
        DataError: weights that cannot be read or do not fit.
    """
    if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or num_classes < 0:
        raise UsageError(f"`num_classes` is {num_classes!r:.80}; give a whole number, 0 for a model without classifier")
    created = build_model(
        name, num_classes=num_classes, img_size=img_size, in_chans=in_chans,
        weights=None if weights is None else Path(weights), pretrained=pretrained, seed=seed, transforms=transforms,
        drop_path_rate=drop_path_rate, kwargs=kwargs, base=base, input=input,
    )  # fmt: skip
    model: Any = created.model
    model.__class__ = _class_of(type(model))
    model.created = created
    return model  # type: ignore[no-any-return]


_classes: dict[type[nn.Module], type[CreatedModel]] = {}


def _class_of(kind: type[nn.Module]) -> type[CreatedModel]:
    """Return the class ``kind`` with the facts, under the name that it has; the same one each time."""
    if kind in _classes:
        return _classes[kind]
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return _classes.setdefault(kind, type(kind.__name__, (CreatedModel, kind), names))


def _empty(kind: type[nn.Module]) -> CreatedModel:
    """Return an object without attributes, to be filled from a copy or a file."""
    own = _class_of(kind)
    return own.__new__(own)
