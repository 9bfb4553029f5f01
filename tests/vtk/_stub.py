"""The stub of ``vtk``, made from its table of lazy names: ``python tests/vtk/_stub.py --write`` writes it anew."""

import sys
from pathlib import Path

import vtk

PATH = Path(vtk.__file__).with_suffix(".pyi")


def stub(where: dict[str, str]) -> str:
    """Return the stub of names that stand in these modules."""
    lines = ["# Made from the table in __init__.py: python tests/vtk/_stub.py --write", ""]
    lines += [f"from {module} import {name} as {name}" for name, module in sorted(where.items(), key=lambda p: p[::-1])]
    return "\n".join([*lines, "", "__version__: str", "__all__: list[str]", ""])


if __name__ == "__main__":
    if "--write" in sys.argv:
        PATH.write_text(stub(vtk._where), encoding="utf-8")
