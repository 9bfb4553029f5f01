"""The card: the description that travels with every pack, checkpoint and exported file.

It is ``task.json`` in a pack, ``__metadata__["vtk"]`` in a merged safetensors file, and ``metadata_props["vtk"]`` plus
``model.json`` beside an ONNX file, so that no later command needs options for size, labels or preprocessing.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from vtk.calibration import Calibration, Threshold
from vtk.errors import DataError
from vtk.formats import parse_json, to_json
from vtk.readers import reading

SCHEMA = 2
"""Newest version of the card's format that is read; a newer one is refused."""

FIRST_SCHEMA, FACTORS_SCHEMA = 1, 2
"""Version of most cards, and of packs that hold factors: a vtk that knows none must refuse these."""

MIN_CROP = 0.05
"""Smallest ``crop_pct``: an image is enlarged to ``size / crop_pct`` before the crop."""

MAX_PIXELS, MAX_CHANNELS, MAX_NUMBER, MAX_LAYERS = 1 << 26, 1024, 1 << 16, 256
"""Upper bounds of a card's numbers, far above any model: building one costs memory before its tensors are compared."""

MAX_NAME = 256
"""Longest model name, in characters."""

VALUE_TYPES = ("int8", "uint16", "int16", "uint32", "int32", "float16", "float32", "float64")
INTERPOLATIONS = ("bicubic", "bilinear", "nearest")
# names come from folders: bytes that are no UTF-8 are escaped as Python does, and that is the only use of this range
_NO_TEXT = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_FAULT, _EDITED = "has an impossible value", "was it edited?"
ResizeMode = Literal["crop", "squash", "pad"]
InitName = Literal["papers", "0.1"]
"""Scheme of the initial weights of layers that are not timm's (`vtk.models.initialization`)."""
T = TypeVar("T")

OWN_ARGUMENTS: Mapping[str, str] = {
    "img_size": "--img-size",
    "num_classes": "the folder's classes",
    "in_chans": "the weights",
    "drop_path_rate": "--drop-path",
    "pretrained": "--no-pretrained",
    **dict.fromkeys(("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"), "--weights"),
    **dict.fromkeys(("features_only", "scriptable", "exportable", "no_jit"), "nothing: it is refused"),
}
"""timm arguments that ``ModelSpec.kwargs`` must not have, and what sets them: some would read or fetch files."""


@dataclass(frozen=True)
class InputSpec:
    """How an image becomes the model's input.

    Attributes:
        height: pixels.
        width: pixels.
        in_chans: channels of the input tensor.
        mean: per channel, of pixel values in [0, 1].
        std: per channel, of pixel values in [0, 1].
        interpolation: ``bicubic``, ``bilinear`` or ``nearest``.
        crop_pct: the image is resized to ``size / crop_pct`` before the centre crop.
        resize_mode: ``crop`` keeps the aspect ratio and cuts, ``squash`` ignores it, ``pad`` keeps it and fills.
        decoding: rules by which files become 8-bit images: ``v0.1``, or ``srgb`` of newer runs, with which embedded
            profiles are converted, every band of a TIFF counts, and ``value_range`` applies (`vtk.data.decoding`).
        value_range: (LOW, HIGH) that become 0 and 255, of images of more than 8 bits; one for all bands or one for
            each; empty where the training images had 8 bits.
        value_type: NumPy's name of the type of those images; raw images of an export are of it.
    """

    height: int
    width: int
    in_chans: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    resize_mode: ResizeMode = "crop"
    decoding: Literal["v0.1", "srgb"] = "v0.1"
    value_range: tuple[tuple[float, float], ...] = ()
    value_type: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; fields unknown to version 0.1 are left out while they have their defaults."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in _NEWER or value != _NEWER[name]}

    def describe_range(self) -> str:
        """Return the value range as a sentence; empty for images of 8 bits."""
        ranges = ", ".join(f"{low:g} to {high:g}" for low, high in self.value_range)
        return f"{self.value_type} values from {ranges} become 0 to 255" if ranges else ""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.height, self.width


_IN_METRICS = ("calibration", "threshold")
_NEWER = {"decoding": "v0.1", "value_range": (), "value_type": ""}


@dataclass(frozen=True)
class ModelSpec:
    """A timm model name and the keyword arguments that differ from timm's defaults (plain JSON values)."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BaseRef:
    """The source of the shared base weights (``hub:NAME``, a path, or ``random:SEED``) and the id of their values."""

    source: str
    id: str


@dataclass(frozen=True)
class Transform:
    """One change made to the architecture after the base was loaded (`vtk.models.transforms.registry`)."""

    op: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Regime:
    """Precision, batch size and device type of the evaluation behind ``Card.metrics``."""

    precision: str = "fp32"
    batch_size: int = 64
    device: str = "cpu"


@dataclass(frozen=True)
class Card:
    """Everything about a trained model except its tensors.

    Attributes:
        model: timm name and arguments.
        input: preprocessing.
        classes: names in index order; none in the checkpoint of a backbone without classifier (`vtk pretrain`).
        base: the shared weights; None in a merged checkpoint that stands alone.
        transforms: changes of the architecture, in order.
        metrics: of the held-out images, accuracies as fractions.
        data: how the training run split its folder (``layout``, ``val_split``, ``seed``), so that an evaluation of the
            same folder takes the same images; and ``init``, the scheme of the weights that ``seed`` drew.
        regime: conditions under which ``metrics`` were measured.
        versions: of Python, torch, timm and this toolkit.
        command: the command line that made it.
        pack: what the tensor file holds (dtype, trained names).
        schema: version of this layout.
        multi_label: whether an image may have any number of the classes: a sigmoid per logit in place of one softmax.
        calibration: temperature of its probabilities; None where none was fitted. In JSON it and ``threshold`` are
            within ``metrics``, where older readers let them be: the logits do not depend on them.
        threshold: the score below which an answer is "unknown"; None where every answer is given.
    """

    model: ModelSpec
    input: InputSpec
    classes: tuple[str, ...]
    base: BaseRef | None = None
    transforms: tuple[Transform, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    regime: Regime = Regime()
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    pack: dict[str, Any] = field(default_factory=dict)
    schema: int = FIRST_SCHEMA
    multi_label: bool = False
    calibration: Calibration | None = None
    threshold: Threshold | None = None

    @property
    def init(self) -> InitName:
        """Scheme of the initial weights of the run that made it; 0.1 in cards that do not say it."""
        return "papers" if self.data.get("init") == "papers" else "0.1"

    @property
    def temperature(self) -> float:
        """Divisor of the logits before the softmax; 1 where none was fitted."""
        return 1.0 if self.calibration is None else self.calibration.temperature

    def uncalibrated(self) -> "Card":
        """Return the card of a model with other logits, for which neither temperature nor threshold holds."""
        return dataclasses.replace(self, calibration=None, threshold=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; fields unknown to older readers are left out while they have their defaults.

        The ``schema`` is that of what is in the card: an exported model made of a pack of factors has none.
        """
        schema = FACTORS_SCHEMA if self.pack.get("factors") else FIRST_SCHEMA
        values = {**dataclasses.asdict(self), "input": self.input.to_dict(), "schema": schema}
        if not self.multi_label:
            del values["multi_label"]
        within = {name: part for name in _IN_METRICS if (part := values.pop(name)) is not None}
        values["metrics"] = {**self.metrics, **within}
        return values

    def merged(self) -> "Card":
        """Return the card of the whole model, in a file that holds no factors."""
        pack = {name: value for name, value in self.pack.items() if name not in ("factors", "start_layout")}
        return dataclasses.replace(self, schema=FIRST_SCHEMA, pack=pack)

    def to_json(self) -> str:
        """Return compact JSON, for metadata fields."""
        return to_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str, where: str | Path) -> "Card":
        """Read `to_json`; ``where`` names the file in messages.

        Raises:
            DataError: not a card, a newer schema, or a field of the wrong type.
        """
        return cls.from_dict(parse_json(text, f"the card of {where}"), where)

    @classmethod
    def from_dict(cls, value: Any, where: str | Path) -> "Card":
        """Build a card from parsed JSON, checking every field.

        Raises:
            DataError: not a card, a newer schema, or a field of the wrong type.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("schema"), int):
            raise DataError(f"{where} is not a vtk card: it has no `schema` number")
        if value["schema"] > SCHEMA:
            raise DataError(
                f"{where} was written by a newer vtk (schema {value['schema']}, this one reads {SCHEMA}); upgrade vtk"
            )
        if value["schema"] < 1:
            raise DataError(f"{where}: `schema` is {value['schema']}; the first was 1")
        card = from_plain(cls, _lift(value), str(where))
        if wrong := _input_fault(card.input) or _card_fault(card):
            raise DataError(f"{where}: {wrong}; the card was edited or damaged")
        return card


def _lift(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return parsed JSON with the fields that are within ``metrics`` beside it."""
    metrics = value.get("metrics")
    if not isinstance(metrics, Mapping):
        return value
    found = {name: metrics[name] for name in _IN_METRICS if name in metrics}
    return {**value, "metrics": {k: v for k, v in metrics.items() if k not in found}, **found}


def _input_fault(spec: InputSpec) -> str | None:
    if min(spec.height, spec.width, spec.in_chans) < 1 or not MIN_CROP <= spec.crop_pct <= 1:
        return f"`input` is impossible: {spec}"
    if spec.height * spec.width > MAX_PIXELS or spec.in_chans > MAX_CHANNELS:
        return f"`input` is larger than {MAX_PIXELS:,} pixels or {MAX_CHANNELS} channels"
    if len(spec.mean) != spec.in_chans or len(spec.std) != spec.in_chans:
        return f"`input.mean` and `input.std` need {spec.in_chans} values each, std above 0"
    if not all(map(math.isfinite, (*spec.mean, *spec.std))) or min(spec.std) <= 0:
        return "`input.mean` and `input.std` must be finite numbers, std above 0"
    if spec.interpolation not in INTERPOLATIONS:
        return f"`input.interpolation` is {_show(spec.interpolation)}; known: {', '.join(INTERPOLATIONS)}"
    if len(spec.value_range) not in (0, 1, spec.in_chans):
        return f"`input.value_range` has {len(spec.value_range)} pairs for {spec.in_chans} channels"
    for pair in spec.value_range:
        if len(pair) != 2 or not math.isfinite(pair[1] - pair[0]) or not pair[1] - pair[0] > 1e-300:
            return f"`input.value_range` has {_show(pair)}, which is no LOW below a HIGH"
    if bool(spec.value_range) != bool(spec.value_type) or spec.value_type not in ("", *VALUE_TYPES):
        return f"`input.value_type` is {_show(spec.value_type)}; known: {', '.join(VALUE_TYPES)}"
    return None


def _card_fault(card: Card) -> str | None:
    # a checkpoint without classes is a backbone without classifier; a pack, which has a base, is of a task
    if (not card.classes and card.base is not None) or len(set(card.classes)) != len(card.classes):
        return "`classes` must be one or more different names"
    if broken := next(filter(_NO_TEXT.search, card.classes), None):
        return f"`classes` has {_show(broken)}, which is no text"
    if len(card.model.name) > MAX_NAME:
        return f"`model.name` has {len(card.model.name):,} letters, timm's at most {MAX_NAME}"
    if odd := next((name for name in card.model.kwargs if not name.isidentifier()), None):  # it is written into code
        return f"`model.kwargs` has {_show(odd)}, which is no name of an argument"
    if own := sorted(OWN_ARGUMENTS.keys() & card.model.kwargs.keys()):
        return f"`model.kwargs` must not have `{own[0]}`"
    arguments = [("model.kwargs", card.model.kwargs), *((f"transforms.{t.op}", t.args) for t in card.transforms)]
    for place, values in arguments:
        for name, value in values.items():
            limit = MAX_LAYERS if "depth" in name or "layers" in name else MAX_NUMBER
            if not all(abs(number) <= limit for number in _numbers(value)):
                return f"`{place}.{name}` is {_show(value)}; the largest number there is {limit}"
    if not 1 <= card.regime.batch_size <= MAX_NUMBER:
        return f"`regime.batch_size` is {card.regime.batch_size}; it is from 1 to {MAX_NUMBER}"
    for name in ("top1", "top5", "loss", "count", "epoch"):
        if not isinstance(card.metrics.get(name, 0.0), (int, float)):
            return f"`metrics.{name}` is no number: {_show(card.metrics[name])}"
    fraction, seed = card.data.get("val_split", 0.0), card.data.get("seed", 0)
    if not isinstance(fraction, (int, float)) or not 0 <= fraction < 1 or not isinstance(seed, int):
        return f"`data` is impossible: {_show(card.data)}"
    if (init := card.data.get("init", "0.1")) not in typing.get_args(InitName):
        return f"`data.init` is {_show(init)}; known: {', '.join(typing.get_args(InitName))}"
    names = card.pack.get("trained", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "`pack.trained` is no list of names"
    for part in (card.calibration, card.threshold):
        if part is not None and (fault := part.fault()):
            return fault
    if card.multi_label and (card.calibration or card.threshold):
        return "`calibration` and `threshold` are of models with one label per image, and this one is multi-label"
    return None


def _numbers(value: Any) -> list[float]:
    if isinstance(value, (list, tuple, dict)):
        return [
            number for inner in (value.values() if isinstance(value, dict) else value) for number in _numbers(inner)
        ]
    return [value] if isinstance(value, (int, float)) else []


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """Build a dataclass from parsed JSON, strictly: unknown keys, missing keys and wrong types are errors.

    Raises:
        DataError: names the field, what it holds and what it should hold.
    """
    with reading(where, _FAULT, _EDITED):
        return typing.cast(T, _convert(kind, value, where))


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise DataError(f"{where}: expected an object, found {_show(value)}")
        hints = typing.get_type_hints(kind)
        fields = {f.name: f for f in dataclasses.fields(kind)}
        if unknown := sorted(set(value) - set(fields)):
            raise DataError(f"{where}: unknown key `{str(unknown[0])[:60]}`; known: {', '.join(fields)}")
        for name, f in fields.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and name not in value:
                raise DataError(f"{where}: `{name}` is missing")
        return kind(**{k: _convert(hints[k], v, f"{where}: `{k}`") for k, v in value.items()})
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args:
            raise DataError(f"{where}: {_show(value)} is not one of {', '.join(map(str, args))}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(args[0], v, where) for v in value)
    if origin is dict and isinstance(value, Mapping):
        return {str(k): v if args[1] is Any else _convert(args[1], v, where) for k, v in value.items()}
    if kind is Any:
        return value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise DataError(f"{where}: expected {getattr(kind, '__name__', kind)}, found {_show(value)}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
