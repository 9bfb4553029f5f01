"""The description of one option: help, bounds and choices, and the error text for a bad value."""

import math
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """Description of an option besides its type and default, used as ``Annotated[type, Option(…)]``.

    Bounds apply to a number, each number of a list, and each side of a size. Numbers must be finite.

    Attributes:
        help: one line, at most 100 characters.
        group: heading in the help; by default that of the class (``GROUP``) which has the field.
        often: commonly used: shown by ``--help``; the others only by ``--help-all``.
        least, most, above, below: bounds; ``above`` and ``below`` are exclusive.
        among: allowed texts of a list.
        pattern: regular expression that a text must match in full; ``allowed`` describes it.
        allowed: description of allowed values in messages; by default made from type and bounds.
        unique: a list must not repeat a value.
        nonempty: a list or a text must not be empty.
        length: required length of a list.
        flag: name on the command line, if different; of a list, such a flag is repeated for each value.
        metavar: placeholder of the value in help.
        convert: applied to the value first, for example ``str`` to accept a ``torch.device``.
        only_yes: a flag without a ``--no-`` form.
        off: help of the ``--no-`` form, of a flag that is on by default.
    """

    help: str
    group: str = ""
    often: bool = False
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    among: tuple[str, ...] = ()
    pattern: str = ""
    allowed: str = ""
    unique: bool = False
    nonempty: bool = False
    length: int | None = None
    flag: str = ""
    metavar: str = ""
    convert: Any = None
    only_yes: bool = False
    off: str = ""

    def range(self) -> str:
        """Return the bounds in words; empty where there are none."""
        least, most, above, below = (_plain(v) for v in (self.least, self.most, self.above, self.below))
        low = f"from {least}" if least else f"above {above}" if above else ""
        if not low:
            return f"at most {most}" if most else f"below {below}" if below else ""
        if most:
            return f"{low} to {most}" if least else f"{low}, at most {most}"
        if below:
            return f"{low} to below {below}"
        return f"at least {least}" if least else low

    def fault(self, value: Any, given: Any) -> str:
        """Return the error text of a value and what is allowed; empty if the value is allowed.

        Args:
            value: of the right type.
            given: before conversion, for the message.
        """
        if isinstance(value, tuple):
            return self._list_fault(value)
        allowed = self._not_allowed(value)
        return f"is {show(given)}; allowed is {allowed}" if allowed else ""

    def _not_allowed(self, value: Any) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return self.allowed or f"a finite number{', ' * bool(self.range())}{self.range()}"
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not self._within(value):
            return self.allowed or self.range()
        if isinstance(value, str):
            if self.nonempty and not value.strip():
                return self.allowed or "text that is not empty"
            if self.among and value not in self.among:
                return self.allowed or ", ".join(self.among)
            if self.pattern and not re.fullmatch(self.pattern, value):
                return self.allowed or self.pattern
        return ""

    def _within(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _list_fault(self, value: tuple[Any, ...]) -> str:
        if self.nonempty and not value:
            return f"is empty; allowed is {self.allowed or ', '.join(self.among) or 'at least one value'}"
        if self.length is not None and len(value) != self.length:
            return f"is {show(value)}; allowed is {self.allowed or f'{self.length} values'}"
        for item in value:
            if allowed := self._not_allowed(item):
                return f"{'is' if len(value) == 1 else 'has'} {show(item)}; allowed is {allowed}"
        if self.unique and len(set(value)) < len(value):
            return f"has a value twice: {show(value)}; give each once"
        return ""


def _plain(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:g}".replace("e+0", "e") if isinstance(value, float) else str(value)


def within(types: str, option: Option) -> str:
    """Return what is allowed: the types in words, and the bounds of numbers."""
    bounds = option.range()
    if not bounds:
        return types
    return f"{types} (numbers {bounds})" if " or " in types else f"{types}, {bounds}"


def show(value: Any) -> str:
    """Return a value for a message, on one line and of bounded length."""
    if isinstance(value, (tuple, list)):
        text = ",".join(map(str, value)) or "empty"
    else:
        text = repr(value) if isinstance(value, str) and not re.fullmatch(r"[\w.+:/@×-]+", value) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}…"
