"""Rules of decoding to 8-bit images, as stored in cards; `vtk.data.decoding.decode` applies them."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from vtk.card import InputSpec

Rules = Literal["v0.1", "srgb"]


@dataclass(frozen=True)
class Decoding:
    """Rules of decoding.

    Attributes:
        rules: ``v0.1`` or ``srgb``.
        ranges: (LOW, HIGH) of images of more than 8 bits, one for all bands or one per band; empty if there is none.
        type: NumPy's name of the type of these images; empty if there are none.
    """

    rules: Rules = "v0.1"
    ranges: tuple[tuple[float, float], ...] = ()
    type: str = ""

    @classmethod
    def of(cls, spec: Any) -> "Decoding":
        """Return the rules of an `InputSpec`; those of version 0.1 for anything else."""
        if not isinstance(spec, InputSpec):
            return cls()
        return cls(spec.decoding, spec.value_range, spec.value_type)

    def applied(self, spec: InputSpec) -> InputSpec:
        """Return ``spec`` with these rules."""
        return dataclasses.replace(spec, decoding=self.rules, value_range=self.ranges, value_type=self.type)


V0_1 = Decoding()
SRGB = Decoding("srgb")
"""Rules of new runs, before the value range is chosen."""


def show_range(pair: tuple[float, float]) -> str:
    """Return a range as text."""
    return f"{show_value(pair[0])}…{show_value(pair[1])}"


def show_value(value: float) -> str:
    """Return a value as text, whole numbers without a point."""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
