"""Reads weights files: tensors and metadata, without running pickled code.

A folder that transformers wrote counts as a file: ``config.json``, and ``model.safetensors`` or several files with an
index of their tensors.
"""

from dataclasses import dataclass
from pathlib import Path

import safetensors
from safetensors.torch import load_file
from torch import Tensor

from vtk.card import Card
from vtk.errors import DataError, UsageError
from vtk.formats import check_safetensors, read_json
from vtk.models.weights.torch_file import read_torch
from vtk.readers import reading

GRID = "vtk_grid"
"""Metadata key of a stored base: height and width in patches of its position table, such as ``4x6``."""
INDEX = "model.safetensors.index.json"
"""Names the file of each tensor of a model that is stored in several."""
SIZE = "vtk_size"
"""Metadata key of a stored base: height and width in pixels of the images its model was made for."""


@dataclass(frozen=True)
class Stored:
    """Contents of a weights file.

    Attributes:
        tensors: by their names in the file.
        card: of a merged checkpoint.
        grid: height and width in patches of its position table, if the file has it.
        size: height and width in pixels of its images, if the file has it.
    """

    tensors: dict[str, Tensor]
    card: Card | None = None
    grid: tuple[int, int] | None = None
    size: tuple[int, int] | None = None


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file and its metadata.

    Raises:
        DataError: the file is absent, truncated or not safetensors.
    """
    check_safetensors(path)
    with reading(path, "is not a whole safetensors file"):
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return load_file(path), metadata


def weights_file(path: Path) -> Path:
    """Return the file to read for a path: of a folder that transformers wrote, its weights or their index.

    Raises:
        DataError: another folder.
    """
    if not path.is_dir():
        return path
    for name in ("model.safetensors", INDEX):
        if (path / "config.json").is_file() and (path / name).is_file():
            return path / name
    inside = sorted(path.glob("*.safetensors"), key=lambda found: (len(found.name), found.name))
    raise DataError(f"{path} is a folder; give a file of weights{f', such as {inside[0]}' if inside else ''}")


def read_weights(path: Path) -> Stored:
    """Read a safetensors or torch file, or an index of several; a state dict may be nested one or two levels deep.

    Raises:
        DataError: absent, truncated, without a state dict, or with objects that could run code.
        UsageError: another type of file.
    """
    path = weights_file(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.name.endswith(".safetensors.index.json"):
        return Stored(_read_parts(path))
    if path.suffix == ".safetensors":
        tensors, metadata = read_safetensors(path)
        card = Card.from_json(metadata["vtk"], path) if "vtk" in metadata else None
        return Stored(tensors, card, _pair(metadata.get(GRID)), card.input.size if card else _pair(metadata.get(SIZE)))
    if path.suffix not in (".pth", ".pt", ".bin", ".tar"):
        raise UsageError(f"{path}: cannot read `{path.suffix}`; give a .safetensors, .pth or .npz file")
    return Stored(read_torch(path))


def _read_parts(index: Path) -> dict[str, Tensor]:
    """Read the files that an index names, beside it; each tensor must be in the file that it says."""
    found = read_json(index)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise DataError(f"{index} has no `weight_map` of tensors to files; give a file of weights")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise DataError(f"{index} names {name[:80]!r}, which is no safetensors file beside it; was it edited?")
        inside = read_safetensors(index.parent / name)[0]
        tensors |= {key: value for key, value in inside.items() if names.get(key) == name}
    if absent := sorted(names.keys() - tensors.keys()):
        raise DataError(f"{index}: `{absent[0][:80]}` is not in {names[absent[0]]}; are the files of one model?")
    return tensors


def _pair(text: str | None) -> tuple[int, int] | None:
    """Return the numbers of a text such as ``4x6``; None for other text and for impossible sizes."""
    sides = [int(side) for side in (text or "").split("x") if side.isdecimal() and len(side) < 6]
    return (sides[0], sides[1]) if len(sides) == 2 and min(sides) > 0 else None
