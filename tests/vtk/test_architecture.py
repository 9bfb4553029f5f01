"""The architecture page: its picture is that of the import contract, and what it names is there."""

import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from vtk.commands import COMMANDS

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "concepts" / "architecture.md"
SVG = "{http://www.w3.org/2000/svg}"


def lines(name: str) -> list[tuple[float, float, str]]:
    """The texts of a picture: each with its x and y."""
    root = ET.parse(REPO / "docs" / "images" / name).getroot()
    return [(float(e.get("x", 0)), float(e.get("y", 0)), e.text or "") for e in root.iter(f"{SVG}text")]


def contract() -> list[list[str]]:
    with (REPO / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = [c["layers"] for c in found if c["type"] == "layers"]
    return [[name.strip() for name in layer.split("|")] for layer in layers]


def test_the_picture_has_the_layers_of_the_import_contract_in_their_order() -> None:
    words = {word.strip(","): (y, x) for x, y, text in lines("layers.svg") for word in text.split()}
    texts = [text for _, _, text in lines("layers.svg")]
    small = " ".join(texts[texts.index("Small modules, highest first") + 1 : texts.index("vtk_kernels")])
    order, lowest = [], 0.0
    for layer in contract():
        if all(name in words for name in layer):
            rows = sorted(words[name][0] for name in layer)
            assert rows[0] > lowest, f"{layer} is not below the layer before it"
            lowest = rows[-1]
        else:
            order += [name.removeprefix("vtk.") for name in layer]
    assert small.split(", ") == order
    packages = {name for name in words if name.startswith(("vtk.", "vtk_"))}
    assert packages == {name for layer in contract() for name in layer if name in words}


@pytest.mark.parametrize("name", ["layers.svg", "data-flow.svg"])
def test_texts_stay_within_their_picture(name: str) -> None:
    root = ET.parse(REPO / "docs" / "images" / name).getroot()
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for element in root.iter(f"{SVG}text"):
        size = 7.4 if "small" in element.get("class", "") else 8.6  # units a letter of a usual font, at most
        long, x, y = size * len(element.text or ""), float(element.get("x", 0)), float(element.get("y", 0))
        left = x - long / 2 if "mid" in element.get("class", "") else x
        assert 0 <= left and left + long <= width and 0 < y < height, element.text
    assert width <= 480, "wider than a phone shows readably"


def test_the_pictures_are_those_that_their_script_draws() -> None:
    script = REPO / "docs" / "_generate" / "architecture.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_and_paths_that_the_page_names_exist() -> None:
    named = re.findall(r"`((?:vtk|export|kernels)/[\w./]+)`", PAGE.read_text("utf-8"))
    assert len(named) > 8 and all((REPO / path).exists() for path in named), named
    shown = " ".join(text for _, _, text in lines("data-flow.svg"))
    assert set(re.findall(r"vtk (\w+)", shown)) <= set(COMMANDS)


def test_every_package_has_a_row_in_the_picture() -> None:
    packages = {path.parent.name for path in (REPO / "vtk").glob("*/__init__.py")} - {"options"}
    shown = {text.removeprefix("vtk.") for _, _, text in lines("layers.svg")}
    assert packages <= shown, packages - shown
