"""Recipes of papers: YAML that holds what differs from a command's defaults, each value with its source.

Those of ``vtk train``, ``vtk finetune`` and ``vtk pretrain`` are in a folder each.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from vtk.errors import UsageError
from vtk.options.files import read_values

COMMANDS = ("train", "finetune", "pretrain")
_NOT = ("data", "out", "resume", "overwrite", "stop_after", "dry_run", "tasks", "init_from")


def names(command: str = "train") -> list[str]:
    """Return the recipes of a command that come with the toolkit."""
    folder = files(__name__) / command
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_recipe(name: str, kind: type) -> dict[str, Any]:
    """Return the values of a recipe.

    A recipe with the key ``recipe`` begins with the values of that one.

    Args:
        name: of one that comes with the toolkit, or a YAML file.
        kind: config dataclass that has the values, such as `vtk.TrainConfig`.

    Raises:
        UsageError: there is none of that name for this command, or a key or value does not fit.
    """
    return _read(name, kind, ())


def recipe_values(name: str | None, kind: type) -> dict[str, Any]:
    """Return the values of a recipe, see `read_recipe`; none where no recipe is given."""
    return {} if name is None else read_recipe(name, kind)


def check_name(name: str | None, kind: Any) -> None:
    """Refuse the name of a recipe that this command does not have; a file's is not looked at.

    Raises:
        UsageError: names the recipes of the command.
    """
    if name is None or is_file(name) or name in (known := names(kind.command)):
        return
    owner = next((command for command in COMMANDS if name in names(command)), None)
    if owner is not None:
        raise UsageError(
            f"`--recipe` {name} is of `vtk {owner}`; those of `vtk {kind.command}` are {', '.join(known)}: choose one "
            "of them, or give a .yaml file"
        )
    raise UsageError(f"`--recipe` {name} is not one of {', '.join(known)}, nor a .yaml file; choose one of them")


def _read(name: str, kind: Any, within: tuple[str, ...]) -> dict[str, Any]:
    values = read_values(_find(name, kind), kind, "--recipe")
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


def _find(name: str, kind: Any) -> Path:
    if is_file(name):
        return Path(name).expanduser()
    check_name(name, kind)
    return Path(str(files(__name__) / kind.command / f"{name}.yaml"))
