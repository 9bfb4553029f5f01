"""Recipes of papers for `vtk train`: YAML that holds what differs from the defaults, each value with its source."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from vtk.errors import UsageError
from vtk.options.files import read_values

_NOT = ("data", "out", "resume", "overwrite", "stop_after", "dry_run")


def names() -> list[str]:
    """Return the recipes that come with the toolkit."""
    folder = files(__name__)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_recipe(name: str, kind: type) -> dict[str, Any]:
    """Return the values of a recipe.

    A recipe with the key ``recipe`` begins with the values of that one.

    Args:
        name: of one that comes with the toolkit, or a YAML file.
        kind: config dataclass that has the values, such as `vtk.TrainConfig`.

    Raises:
        UsageError: there is none of that name, or a key or value does not fit.
    """
    return _read(name, kind, ())


def _read(name: str, kind: type, within: tuple[str, ...]) -> dict[str, Any]:
    values = read_values(_find(name), kind, "--recipe")
    if wrong := [key for key in _NOT if key in values]:
        raise UsageError(f"`--recipe` {name}: `{wrong[0]}` is of one run, not of a recipe; give --{wrong[0]} instead")
    first = values.pop("recipe", None)
    if first is None:
        return values
    if first in (name, *within):
        raise UsageError(f"`--recipe` {name} begins with {first}, which begins with it; take one of them out")
    return {**_read(first, kind, (*within, name)), **values}


def is_file(name: str | None) -> bool:
    """Tell whether a recipe's name is that of a file."""
    return name is not None and (name.endswith((".yaml", ".yml")) or "/" in name)


def _find(name: str) -> Path:
    if is_file(name):
        return Path(name).expanduser()
    if name not in names():
        raise UsageError(f"`--recipe` {name} is not one of {', '.join(names())}, nor a .yaml file; choose one of them")
    return Path(str(files(__name__) / f"{name}.yaml"))
