"""What a refused option says."""

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
