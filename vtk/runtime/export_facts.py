"""Facts of an ONNX export beyond the card, such as its precision, kept in ``metadata_props["vtk.export"]``."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vtk.card import from_plain
from vtk.errors import DataError
from vtk.formats import parse_json

KEY = "vtk.export"
"""Name of the property; a plain fp32 file has none."""

PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Facts:
    """Precision and other properties of an exported file.

    Attributes:
        precision: ``fp32``, ``fp16`` or ``bf16``, of weights and arithmetic.
        int8: ``dynamic`` or ``static`` if weights and products are int8, else "".
        keep_io_types: whether inputs and outputs are fp32 at any precision.
        preprocessing: whether resizing and normalising are in the graph (its input is ``images``, uint8).
        dynamic_size: whether it takes images of other sizes than the card's.
        verified: whether its values were compared with torch's; False only on request.
        target: runtime that it was exported for, "" for any.
        batch_dependence: largest change of an image's outputs by other images of the call, measured at verification, as
            a fraction of the largest output; 0 if it is rounding.
        fp8: whether the wide products read e4m3; ``precision`` is that of the rest.
        names: of inputs and outputs that the file calls otherwise than this toolkit (``pixel_values``, ``images``,
            ``logits``, ``probabilities``, ``features``, ...): the toolkit's name to the file's.
        stored: ``fp16`` where weights are stored in that type and computed with in ``precision``, else "".
    """

    precision: str = "fp32"
    int8: str = ""
    keep_io_types: bool = False
    preprocessing: bool = False
    dynamic_size: bool = False
    verified: bool = True
    target: str = ""
    batch_dependence: float = 0.0
    fp8: bool = False
    names: dict[str, str] = field(default_factory=dict, compare=False)
    stored: str = ""

    def name(self, term: str) -> str:
        """Return what the file calls an input or output that this toolkit calls ``term``."""
        return self.names.get(term, term)

    def term(self, name: str) -> str:
        """Return what this toolkit calls an input or output of the file."""
        return next((term for term, given in self.names.items() if given == name), name)

    @property
    def kind(self) -> str:
        """The precision whose limits its outputs are compared with: ``int8``, ``fp8``, or ``precision``."""
        return "int8" if self.int8 else "fp8" if self.fp8 else self.stored or self.precision

    @property
    def calibrated(self) -> bool:
        """Whether it was calibrated on training images, so that it is verified on other images."""
        return self.int8 == "static" or self.fp8

    @property
    def apart(self) -> bool:
        """Whether each image needs a call of its own, because outputs depend on the other images of a call."""
        return self.int8 == "dynamic" or self.batch_dependence > 0

    def props(self) -> dict[str, str]:
        """Return the properties to write: none for a plain file."""
        if self == PLAIN and not self.names:
            return {}
        values = dataclasses.asdict(self)
        if not self.names:  # a key that earlier versions do not know, and need not know of such a file
            del values["names"]
        if not self.stored:
            del values["stored"]
        return {KEY: json.dumps(values)}

    def notes(self) -> tuple[str, ...]:
        """Return the lines that a command prints when it opens the file."""
        if self == PLAIN:
            return ()
        kind = f"int8 ({self.int8})" if self.int8 else f"fp8, the rest {self.precision}" if self.fp8 else self.precision
        if not self.verified:
            return (f"this {kind} file was exported with --unverified: its outputs were not compared with torch",)
        kind += f", its weights stored in {self.stored}" if self.stored else ""
        ends = ", its inputs and outputs fp32" if self.keep_io_types else ""
        alone = (
            "; its outputs depend on the other images of a call, so `vtk eval` and `vtk predict` run one image a call"
            if self.apart
            else ""
        )
        prepares = ", and prepares decoded images itself" if self.preprocessing else ""
        return (f"this file is {kind}{ends}{prepares}{alone}",)


PLAIN = Facts()
"""Facts of an fp32 file of one image size."""


def read_facts(properties: Mapping[str, str], path: Path) -> Facts:
    """Read the facts that `Facts.props` wrote; a file without them is a plain one.

    Raises:
        DataError: the property was edited or damaged.
    """
    if KEY not in properties:
        return PLAIN
    where = f"{path}: `{KEY}`"
    facts = from_plain(Facts, parse_json(properties[KEY], where), where)
    if (
        facts.precision not in PRECISIONS
        or facts.int8 not in ("", "dynamic", "static")
        or facts.stored not in ("", "fp16")
    ):
        said = f"{facts.precision!r}, {facts.int8!r}, {facts.stored!r}"
        raise DataError(f"{where} says {said}; the file was edited, export it again")
    if len({*facts.names.values()}) < len(facts.names):
        raise DataError(f"{where} has one name for two tensors; the file was edited, export it again")
    return facts
