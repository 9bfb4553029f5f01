"""CONTRIBUTING lists the packages that exist, in the order of the import contract."""

import re
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ROOTS = {"vtk": REPO, "vtk_export": REPO / "export", "vtk_kernels": REPO / "kernels"}


def rows(number: int) -> list[list[str]]:
    """Return the lines of a block of "Where things go" as the names before, and the words after, two spaces or more."""
    (part,) = re.findall(r"^## Where things go\n(.*?)^## ", (REPO / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S)
    block = re.findall(r"^```\n(.*?)^```", part, re.M | re.S)[number]
    return [re.split(r" {2,}", line) for line in block.splitlines()]


def packages() -> set[str]:
    """Return the dotted names of all packages below the three roots."""
    found = set()
    for root, folder in ROOTS.items():
        for file in (folder / root).rglob("__init__.py"):
            found.add(".".join(file.parent.relative_to(folder).parts))
    return found


def test_the_layers_are_those_of_the_contract() -> None:
    with (REPO / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if c["type"] == "layers"]
    assert [names for names, _ in rows(0)] == contract["layers"]


def test_every_package_is_listed_and_every_listed_package_exists() -> None:
    listed = {name for names, _ in rows(0) for name in names.split(" | ")}
    inside = {f"{parent}.{name}" for parent, names in rows(1) for name in names.split(", ")}
    exist = packages()
    assert len(exist) > 30
    assert exist - {"vtk"} <= listed | inside, exist - {"vtk"} - listed - inside
    assert inside <= exist, inside - exist
