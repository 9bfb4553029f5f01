"""Finds packs and reads their cards, without torch and without reading weights."""

import os
from collections.abc import Iterator
from pathlib import Path

from vtk.card import Card, from_plain
from vtk.errors import DataError
from vtk.files import existing_dir
from vtk.formats import read_header, read_json

TENSORS, CARD, HASHES = "task.safetensors", "task.json", "base_tensors.json"
"""Files of a pack."""


def is_pack(path: Path) -> bool:
    """Return whether a folder is a pack."""
    return (existing_dir(path) / CARD).is_file()


def find_pack(path: Path) -> Path:
    """Return a pack's folder: ``path``, or the best pack of a run folder.

    Raises:
        DataError: it is neither.
    """
    for folder in (path, path / "task"):
        if is_pack(folder):
            return existing_dir(folder)
    if several := sorted(str(card.parent) for card in path.glob(f"*/task/{CARD}")):
        raise DataError(f"{path} is the folder of several tasks; give one of them: {', '.join(several[:5])}")
    for name in ("model.safetensors", "backbone.safetensors"):  # of `vtk train` and `vtk pretrain`
        if (path / name).is_file():
            raise DataError(f"{path} has {name} and no pack; give that file where a checkpoint is allowed, or a pack")
    what = "is neither a pack nor a run folder" if path.is_dir() else "is not a folder"
    raise DataError(f"{path} {what}; give the folder that holds {CARD}")


def read_card(path: Path) -> Card:
    """Read the card of a pack or of a merged checkpoint, without its tensors.

    Raises:
        DataError: neither, or damaged.
    """
    folder = existing_dir(path)
    if (folder / CARD).is_file():
        return Card.from_dict(read_json(folder / CARD, limit=16 << 20), folder / CARD)
    if path.suffix == ".safetensors" and path.is_file():
        metadata = read_header(path).get("__metadata__") or {}
        if not isinstance(metadata, dict) or not isinstance(metadata.get("vtk"), str):
            raise DataError(f"{path} has no vtk card; make one with `vtk tasks merge PACK`")
        return Card.from_json(metadata["vtk"], path)
    raise DataError(f"{path} is neither a pack (a folder with {CARD}) nor a merged .safetensors")


def read_hashes(path: Path) -> dict[str, str]:
    """Return the sha256 per base tensor that a pack was trained on.

    Raises:
        DataError: the file is absent or not a map of names to hashes.
    """
    return from_plain(dict[str, str], read_json(path / HASHES), str(path / HASHES))


def find_packs(root: Path) -> Iterator[Path]:
    """Yield the folders of all packs below a folder, sorted; links to folders are not followed.

    Raises:
        DataError: ``root`` is not a folder.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "there is no such folder"
        raise DataError(f"{root}: {what}; give folders that hold packs")
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if ".tmp-" not in name)
        if CARD in files and ".tmp-" not in os.path.basename(folder):
            yield Path(folder)


def pack_bytes(path: Path) -> int:
    """Return the bytes of a pack's files."""
    with os.scandir(existing_dir(path)) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())
