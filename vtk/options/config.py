"""The base of every config: a frozen dataclass whose values are converted and checked when it is made."""

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from vtk.errors import UsageError
from vtk.options.values import coerce

OTHER = "other"


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its type and default; stands in ``Annotated[type, Option(…)]``.

    A number, each number of a list, and each side of a size has to be within the bounds; numbers are finite anyway.

    Attributes:
        help: one line, at most 100 characters.
        group: heading in the help; by default that of the class (``GROUP``) which has the field.
        often: people use it: shown by ``--help``, the others by ``--help-all``.
        least, most, above, below: bounds, the latter two not included.
        among: what each text of a list may be.
        pattern: what a text has to match in full; ``allowed`` says it in words.
        allowed: what a message says is allowed, in place of words made from the type and the bounds.
        unique: a list names nothing twice.
        nonempty: a list or a text has something in it.
        length: of a list.
        flag: name on the command line, if another; such a flag is given once for each value of a list.
        metavar: what stands for the value in help.
        convert: called with the value first, for instance ``str`` where torch's own types serve too.
        only_yes: a switch without a ``--no-`` form.
        off: of a switch that is on by default: what its ``--no-`` form does.
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
        """Return what is wrong with a value, and what is allowed; empty if it is fine.

        Args:
            value: of the right type.
            given: as it was before it was converted to that, for the message.
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
            return f"{show(value)} names one of them twice; name each once"
        return ""


def _plain(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:g}".replace("e+0", "e") if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the configs; a subclass is a frozen, keyword-only dataclass whose fields are annotated with an `Option`.

    Every value is converted to its field's type (text to a path, a list to a tuple) and checked when the config is
    made, whether by a command, a YAML file, ``dataclasses.replace`` or a caller in Python.

    Raises:
        UsageError: one line with the option, its value and what is allowed.
    """

    GROUP: ClassVar[str] = OTHER
    RETIRED: ClassVar[Mapping[str, Any]] = {}
    """Options of older versions that could have one value only."""

    def __post_init__(self) -> None:
        """Convert and check each value, then what they do to each other (`check`)."""
        for f in dataclasses.fields(self):
            value = set_value(type(self), f.name, getattr(self, f.name))
            object.__setattr__(self, f.name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other; subclasses extend it."""

    @classmethod
    def upgrade(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a file without those of `RETIRED` options, where they say nothing else than that."""
        return {k: v for k, v in values.items() if k not in cls.RETIRED or v != cls.RETIRED[k]}


def set_value(kind: type[Config], name: str, value: Any, *, text: bool = False) -> Any:
    """Return a value as a config's field holds it.

    Raises:
        UsageError: it has another type, or is out of bounds.
    """
    option, given = option_of(kind, name), value
    if option.convert is not None and value is not None:
        value = option.convert(value)
    try:
        value = coerce(type_of(kind, name), value, text=text)
        fault = option.fault(value, given)
    except ValueError as error:
        # text that looks like the number that is wanted, from Python
        shown = repr(given) if isinstance(given, str) and not text and given[:1].isdecimal() else show(given)
        fault = f"is {shown}; allowed is {option.allowed or within(str(error), option)}"
    if fault:
        raise UsageError(f"`{flag_of(kind, name)}` {fault}")
    return value


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


def flag_of(kind: type, name: str) -> str:
    """Return an option's name on the command line."""
    return f"--{(option_of(kind, name).flag or name).replace('_', '-')}"


@cache
def _described(kind: type) -> dict[str, tuple[Any, Option]]:
    found = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for f in dataclasses.fields(kind):
        hint, option = hints[f.name], None
        if typing.get_origin(hint) is Annotated:
            option = next((m for m in hint.__metadata__ if isinstance(m, Option)), None)
            hint = hint.__origin__
        if option is None:
            raise TypeError(f"{kind.__name__}.{f.name} has no Option")
        owner = next(cls for cls in kind.__mro__ if f.name in vars(cls).get("__annotations__", {}))
        found[f.name] = (hint, dataclasses.replace(option, group=option.group or getattr(owner, "GROUP", OTHER)))
    return found


def option_of(kind: type, name: str) -> Option:
    """Return what is known of an option of a config."""
    return _described(kind)[name][1]


def type_of(kind: type, name: str) -> Any:
    """Return an option's type."""
    return _described(kind)[name][0]


def groups_of(kind: type) -> dict[str, list[str]]:
    """Return the names of a config's options by the heading that they stand under."""
    found: dict[str, list[str]] = {}
    for f in dataclasses.fields(kind):
        found.setdefault(option_of(kind, f.name).group, []).append(f.name)
    return found


def expect(config: object, kind: type[Config], function: str) -> None:
    """Refuse what is no config of a function's.

    Args:
        config: what the function was given.
        kind: what it takes.
        function: its name.

    Raises:
        UsageError: names the function, what it takes and what it was given.
    """
    if not isinstance(config, kind):
        given = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
        name = f"vtk.{kind.__name__}"
        raise UsageError(f"`vtk.{function}` takes its options as a {name}, found {given}; give {name}(…)")


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Refuse the value of an option, for what its bounds cannot say.

    Args:
        ok: whether it is fine after all.
        name: of the option.
        value: of it.
        allowed: what it may be.

    Raises:
        UsageError: names the flag, its value and what is allowed.
    """
    if not ok:
        raise UsageError(f"`--{name.replace('_', '-')}` is {show(value)}; allowed is {allowed}")
