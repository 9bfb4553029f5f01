"""The base of every config: a frozen dataclass whose values are converted and checked when it is made."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from vtk.errors import UsageError
from vtk.options.option import Option, show, within
from vtk.options.values import coerce

OTHER = "other"


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
    """Former options that had one allowed value, with that value."""

    def __post_init__(self) -> None:
        """Convert and check each value, then their combinations (`check`)."""
        for f in dataclasses.fields(self):
            value = set_value(type(self), f.name, getattr(self, f.name))
            object.__setattr__(self, f.name, value)
        self.check()

    def check(self) -> None:
        """Refuse values that contradict each other; subclasses extend it."""

    @classmethod
    def upgrade(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a file without `RETIRED` options that have their one allowed value."""
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
        # from Python: quotes show that text was given where a number is expected
        shown = repr(given) if isinstance(given, str) and not text and given[:1].isdecimal() else show(given)
        fault = f"is {shown}; allowed is {option.allowed or within(str(error), option)}"
    if fault:
        raise UsageError(f"`{flag_of(kind, name)}` {fault}")
    return value


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
    """Return the `Option` of a config's field."""
    return _described(kind)[name][1]


def type_of(kind: type, name: str) -> Any:
    """Return an option's type."""
    return _described(kind)[name][0]


def groups_of(kind: type) -> dict[str, list[str]]:
    """Return the names of a config's options by the heading of their group."""
    found: dict[str, list[str]] = {}
    for f in dataclasses.fields(kind):
        found.setdefault(option_of(kind, f.name).group, []).append(f.name)
    return found


def expect(config: object, kind: type[Config], function: str) -> None:
    """Refuse a config of the wrong class.

    Args:
        config: argument of the function.
        kind: the expected class.
        function: its name.

    Raises:
        UsageError: names the function, the expected class and the given one.
    """
    if not isinstance(config, kind):
        given = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
        name = f"vtk.{kind.__name__}"
        raise UsageError(f"`vtk.{function}` takes its options as a {name}, found {given}; give {name}(…)")


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Refuse the value of an option by a condition that `Option` cannot express.

    Args:
        ok: whether the value is allowed.
        name: of the option.
        value: its value.
        allowed: allowed values, for the message.

    Raises:
        UsageError: names the flag, its value and what is allowed.
    """
    if not ok:
        raise UsageError(f"`--{name.replace('_', '-')}` is {show(value)}; allowed is {allowed}")
