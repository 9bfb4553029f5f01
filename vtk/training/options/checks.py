"""What a refused option says."""

from dataclasses import fields
from math import isfinite
from typing import Any

from vtk.errors import UsageError


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Refuse a value.

    Args:
        ok: whether it is fine after all.
        name: of the field.
        value: of it.
        allowed: what it may be.

    Raises:
        UsageError: names the flag, its value and what is allowed.
    """
    if not ok:
        raise UsageError(f"`--{name.replace('_', '-')}` is {value}; allowed is {allowed}")


def check_finite(config: Any) -> None:
    """Refuse a config dataclass with a number that is infinite or none.

    Raises:
        UsageError: names the flag.
    """
    for f in fields(config):
        value = getattr(config, f.name)
        require(not isinstance(value, float) or isfinite(value), f.name, value, "a finite number")
