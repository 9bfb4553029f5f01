"""Facts of an ONNX export beyond the card, such as its precision, kept in ``metadata_props["vtk.export"]``."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtk.card import from_plain
from vtk.errors import DataError
from vtk.formats import parse_json

KEY = "vtk.export"
"""Name of the property; a plain fp32 file has none."""

PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Facts:
    """How a file was made.

    Attributes:
        precision: ``fp32``, ``fp16`` or ``bf16``, of weights and arithmetic.
        int8: ``dynamic`` or ``static`` where weights and products are int8, else "".
        keep_io_types: whether inputs and outputs are fp32 whatever the precision.
        preprocessing: whether resizing and normalising are in the graph (its input is ``images``, uint8).
        dynamic_size: whether it takes images of other sizes than the card's.
        verified: whether its values were compared with torch's; False only on request.
        target: run time that it was made for, "" for any.
        batch_dependence: how far the other images of a call changed an image's outputs when the file was verified, as
            a fraction of the largest; 0 where that is rounding.
        fp8: whether the wide products read e4m3; ``precision`` is then that of all else.
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

    @property
    def kind(self) -> str:
        """What its answers are judged by: ``int8``, ``fp8``, or the precision."""
        return "int8" if self.int8 else "fp8" if self.fp8 else self.precision

    @property
    def calibrated(self) -> bool:
        """Whether training images went into it, so that others judge it."""
        return self.int8 == "static" or self.fp8

    @property
    def apart(self) -> bool:
        """Whether each image is to be run in a call of its own, so that its answer does not depend on others."""
        return self.int8 == "dynamic" or self.batch_dependence > 0

    def props(self) -> dict[str, str]:
        """Return the properties to write: none for a plain file."""
        return {} if self == PLAIN else {KEY: json.dumps(dataclasses.asdict(self))}

    def notes(self) -> tuple[str, ...]:
        """Return what a command that runs the file says."""
        if self == PLAIN:
            return ()
        kind = f"int8 ({self.int8})" if self.int8 else f"fp8, the rest {self.precision}" if self.fp8 else self.precision
        if not self.verified:
            return (f"this {kind} file was exported with --unverified: nobody has compared its values with torch's",)
        ends = ", its inputs and outputs fp32" if self.keep_io_types else ""
        alone = (
            "; its answers depend on the images that share a call, so `vtk eval` and `vtk predict` run one image a call"
            if self.apart
            else ""
        )
        prepares = ", and prepares decoded images itself" if self.preprocessing else ""
        return (f"this file is {kind}{ends}{prepares}{alone}",)


PLAIN = Facts()
"""Of a file that is fp32 throughout and of one size."""


def read_facts(properties: Mapping[str, str], path: Path) -> Facts:
    """Read what `Facts.props` wrote; a file without it is a plain one.

    Raises:
        DataError: the property was edited or damaged.
    """
    if KEY not in properties:
        return PLAIN
    where = f"{path}: `{KEY}`"
    facts = from_plain(Facts, parse_json(properties[KEY], where), where)
    if facts.precision not in PRECISIONS or facts.int8 not in ("", "dynamic", "static"):
        raise DataError(f"{where} says {facts.precision!r}, {facts.int8!r}; the file was edited, export it again")
    return facts
