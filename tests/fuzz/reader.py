"""A reader of others' files: whole files, how they are damaged, and what reads them."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from tests.fuzz.mutators import Mutator, flip, json_text, safetensors
from tests.fuzz.structured import protobuf
from vtk.errors import VtkError

V0_1 = Path(__file__).resolve().parents[1] / "fixtures" / "v0_1"
CARD = json.loads((V0_1 / "digits-bf16" / "task.json").read_text())
NAME, KWARGS = CARD["model"]["name"], CARD["model"]["kwargs"]


@dataclass(frozen=True)
class Reader:
    """What reads a kind of file.

    Attributes:
        share: of all damaged files.
        make: writes whole files into a folder.
        read: reads a folder in which one file, its second argument, is damaged.
        damage: by the end of a file's name, how it is damaged; files that are not named here stay whole.
    """

    share: int
    make: Callable[[Path], object]
    read: Callable[[Path, Path], object]
    damage: Mapping[str, tuple[Mutator, ...]]


ONNX = (flip, protobuf(onnx.ModelProto.FromString), protobuf(onnx.ModelProto.FromString))
JSON = (flip, json_text, json_text)
TENSORS = (flip, safetensors, safetensors)


def copy(*names: str) -> Callable[[Path], object]:
    """Return what copies files and folders of version 0.1."""

    def make(folder: Path) -> None:
        for name in names:
            place = V0_1 / name
            if place.is_dir():
                shutil.copytree(place, folder, dirs_exist_ok=True)
            else:
                shutil.copyfile(place, folder / place.name)

    return make


def quietly(read: Callable[[], object]) -> None:
    try:
        read()
    except VtkError as error:
        check_line(error)


def check_line(error: Exception) -> None:
    """Hold an error's text against what a line is: short, and printable but for what the caller's own words hold."""
    text = str(error)
    assert text and "\n" not in text and len(text) < 4000, f"no line: {text[:300]!r}"
    text.encode("utf-8", "backslashreplace")
