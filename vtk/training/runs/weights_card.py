"""Takes model and input from the card of ``--weights``, where the options leave them open."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtk.card import Card
from vtk.errors import DataError
from vtk.models.arguments import parse_model_kwargs
from vtk.models.inputs import Size
from vtk.packs.cards import read_card
from vtk.training.options.source import SourceOptions
from vtk.training.run_config import RunConfig


@dataclass(frozen=True)
class ModelChoice:
    """A model to train, from flags and from the card of its weights.

    Attributes:
        name: of timm.
        kwargs: for timm.
        size: pixels, height first; None for the model's own.
        input: preprocessing that differs from the model's own.
        note: what was taken from a card; None where nothing was.
        card: of the weights, whatever was taken from it.
    """

    name: str
    kwargs: dict[str, Any]
    size: Size
    input: dict[str, Any]
    note: str | None = None
    card: Card | None = None


def choose_model(config: RunConfig) -> ModelChoice:
    """Return the model of a run: options override the card, if ``--model`` is left out or is that of the card.

    Changes of the architecture that the weights were trained with are handled by the model
    (`vtk.models.transform_order`).
    """
    kwargs = parse_model_kwargs(config.model_kwargs)
    options = {key: getattr(config, key) for key in ("mean", "std", "interpolation", "crop_pct", "resize_mode")}
    card = None if config.weights is None else _card(config.weights)
    left_out = config.model == SourceOptions.model and not kwargs
    if card is None or not (left_out or config.model == card.model.name):
        return ModelChoice(config.model, kwargs, config.img_size, options, card=card)
    stored: dict[str, Any] = {"interpolation": card.input.interpolation, "crop_pct": card.input.crop_pct}
    if card.input.in_chans == config.in_chans:
        stored |= {"mean": card.input.mean, "std": card.input.std}
    name = f"{'an' if card.model.name.startswith(tuple('aeiou')) else 'a'} {card.model.name}"
    note = f"{config.weights} is {name} for {card.input.height}×{card.input.width} px, as its card says"
    return ModelChoice(
        card.model.name, {**card.model.kwargs, **kwargs}, config.img_size or card.input.size,
        {key: stored.get(key) if value is None else value for key, value in options.items()}, note,
        card,
    )  # fmt: skip


def _card(path: Path) -> Card | None:
    if path.suffix != ".safetensors":
        return None
    try:
        return read_card(path)
    except DataError:  # no card, or a file that is refused where its tensors are read
        return None
