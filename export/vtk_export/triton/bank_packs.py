"""Writes the packs of a `TaskBank` into a version folder, with their base once, and verifies the bank.

Packs that the model has already were verified when they came: of these a few are compared again, beside what is new.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk import console
from vtk.bank import TaskBank
from vtk.card import Card
from vtk.errors import BaseError, DataError, UsageError, VerificationError
from vtk.files import existing_dir
from vtk.formats import read_json, write_json
from vtk.packs.base_files import store_base
from vtk.packs.cards import CARD, HASHES, TENSORS, read_card
from vtk.packs.load import load_task
from vtk.runtime.data_option import data_images
from vtk.runtime.opening import open_source
from vtk_export.gate.images import card_images
from vtk_export.gate.verify import RELATIVE_BOUND
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.publish import link_file

INDEX, BASE, PACKS = "tasks.json", "base.safetensors", "packs"
_CHECKED = 3
"""Images of a task that it is verified with."""
AGAIN = 3
"""Tasks that are verified again."""
PARTS = (CARD, TENSORS, HASHES)


@dataclass(frozen=True)
class BankRow:
    """What a bank of all tasks gave for one of them.

    Attributes:
        task: name.
        error: largest absolute difference from its own model's logits.
        bound: largest one allowed.
        agreed: images of the same class.
        images: in all.
    """

    task: str
    error: float
    bound: float
    agreed: int
    images: int

    @property
    def passed(self) -> bool:
        """Whether it is right; NaN is not."""
        return self.error <= self.bound and self.agreed == self.images


@dataclass(frozen=True)
class BankFolder:
    """A version folder with the packs of a bank.

    Attributes:
        cards: of the tasks.
        base: id of their base.
        rows: what the bank gave against each task's own model.
        images: what it was given.
    """

    cards: dict[str, Card]
    base: str
    rows: tuple[BankRow, ...]
    images: str


def write_packs(
    named: Mapping[str, Path], version: Path, config: TritonCommand, folders: Mapping[str, Path | None] | None = None,
    *, earlier: Path | None = None, show: bool = True,
) -> BankFolder:  # fmt: skip
    """Write base, packs and index, load them as the server will, and compare with each task's own model.

    Args:
        named: name to pack or run folder.
        version: the folder, empty.
        config: options.
        folders: images of ``--data``, by the name of the task.
        earlier: version folder that the same code wrote; its packs are known to be right.
        show: print the comparison.

    Raises:
        UsageError: no pack, or one that a bank does not take.
        BaseError: packs of different bases.
        DataError: a damaged pack, or the folder cannot be written.
        VerificationError: the bank's logits are not those of a task's own model.
    """
    paths = {name: _pack(path) for name, path in named.items()}
    cards = {name: read_card(path) for name, path in paths.items()}
    base = _common_base(paths, cards)
    known = {} if earlier is None else _known(earlier, base, paths)
    again = list(known)[:AGAIN]
    expected: dict[str, tuple[Tensor, Tensor]] = {}
    whats: list[str] = []
    for i, (name, path) in enumerate(paths.items()):
        if name in known and name not in again:
            continue
        console.stage(f"loading {name}")
        task = load_task(path, base=config.base)
        assert task.base is not None
        if task.bundled:
            raise UsageError(f"{path} is a bundle, which brings only what it needs itself of its base; give the whole "
                             "one: --base FILE")  # fmt: skip
        if not (version / BASE).exists():
            stored = store_base(task.base)
            link_file(earlier / BASE, version / BASE) if earlier and known else shutil.copyfile(stored, version / BASE)
        # another seed for each task: were all images alike, one that met another's weights might not show
        given = data_images(task.card, (folders or {}).get(name), config.split)
        images, what = card_images(task.card, _CHECKED, given, seed=config.seed + i)
        whats.append(what)
        with torch.no_grad():
            expected[name] = (images, task.model(images))
    entries: dict[str, Any] = {}
    for name, path in paths.items():
        (version / PACKS / name).mkdir(parents=True)
        for part in PARTS:
            if name in known:
                link_file(known[name] / part, version / PACKS / name / part)
            else:
                shutil.copyfile(path / part, version / PACKS / name / part)
        entries[name] = {"pack": f"{PACKS}/{name}", "digest": _digest(version / PACKS / name)}
    write_json(version / INDEX, {"format": 1, "base": base, "tasks": entries})
    rows, what = _verify(version, expected), "; ".join(dict.fromkeys(whats))
    wrong = [row for row in rows if not row.passed]
    if show or wrong:
        cells = [(r.task, f"{r.error:.1e}", f"{r.bound:.1e}", f"{r.agreed} of {r.images}") for r in rows]
        console.table("bank against each task's own model, fp32", ("task", "error", "bound", "agreed"), cells)
        console.say(f"verified with {what}")
        if len(rows) < len(named):
            console.say(f"{len(named) - len(rows)} packs are those of the model as it is, and were verified then")
    if wrong:
        raise VerificationError(
            f"the bank's logits of `{wrong[0].task}` differ by {wrong[0].error:.1e}, {wrong[0].bound:.1e} is allowed; "
            "nothing was kept: export that pack with --backend onnxruntime, and please report this"
        )
    return BankFolder(cards, base, tuple(rows), what)


def has_base(earlier: Path, base: str) -> bool:
    """Return whether the packs of an earlier export have this base id.

    A damaged index says nothing; then a pack's card does, and the export repairs the model that serves.
    """
    try:
        index = read_json(earlier / INDEX)
    except DataError:
        index = None
    if isinstance(index, dict) and "base" in index:
        return index["base"] == base and index.get("format") == 1
    for path in sorted((earlier / PACKS).glob(f"*/{CARD}")):
        try:
            card = read_card(path.parent)
        except DataError:
            continue
        return card.base is not None and card.base.id == base
    return False


def _common_base(paths: Mapping[str, Path], cards: Mapping[str, Card]) -> str:
    """Return the id of the base that all packs have."""
    ids = {name: None if card.base is None else card.base.id for name, card in cards.items()}
    first, base = next(iter(ids.items()))
    for name, other in ids.items():
        if other is None or base is None:
            raise DataError(f"the card of {paths[name if other is None else first]} names no base; the pack was edited")
        if other != base:
            raise BaseError(f"`{name}` ({paths[name]}) is of base {other[:12]}, `{first}` of {base[:12]}; a bank has "
                            "one base: export them apart")  # fmt: skip
    assert base is not None
    return base


def _known(earlier: Path, base: str, paths: Mapping[str, Path]) -> dict[str, Path]:
    """Return those packs that a version has already, bit for bit, as folders of that version."""
    if not has_base(earlier, base) or not (earlier / BASE).is_file():
        return {}
    try:
        tasks = read_json(earlier / INDEX)["tasks"]
        served = {
            name: earlier / PACKS / name for name in paths if tasks.get(name, {}).get("pack") == f"{PACKS}/{name}"
        }
        wanted = {name: tasks[name]["digest"] for name in served}
        return {name: pack for name, pack in served.items()
                if pack_digest(pack) == wanted[name] == pack_digest(paths[name])}  # fmt: skip
    except (DataError, OSError, TypeError, KeyError, AttributeError):  # a damaged index: all are verified
        return {}


def pack_digest(pack: Path) -> str:
    """Return what tells a pack's files from others; "" where one is absent or no plain file."""
    return _digest(pack) if all((pack / part).is_file() for part in PARTS) else ""


def _pack(path: Path) -> Path:
    if not existing_dir(path).exists():
        raise DataError(f"{path} does not exist; give packs or run folders, each as PACK or NAME=PACK")
    source = open_source(path)
    if source.kind != "pack" or source.path is None:
        raise UsageError(f"{path} is not a task pack but a {source.kind}, which shares no base; give packs, or "
                         "--backend onnxruntime")  # fmt: skip
    return source.path


def _digest(pack: Path) -> str:
    hasher = hashlib.sha256()
    for part in PARTS:
        hasher.update(json.dumps([part, (pack / part).stat().st_size]).encode())
        with (pack / part).open("rb") as file:
            while chunk := file.read(1 << 24):
                hasher.update(chunk)
    return hasher.hexdigest()[:16]


def _verify(version: Path, expected: Mapping[str, tuple[Tensor, Tensor]]) -> list[BankRow]:
    """Load the written bank in fp32, and run all tasks in one call."""
    console.stage("comparing the bank with each pack's own model")
    bank = TaskBank(version / BASE, dtype=torch.float32)
    for name in expected:
        bank.add(name, version / PACKS / name)
    found = bank({name: images for name, (images, _) in expected.items()})
    return [
        BankRow(name, float((found[name] - logits).abs().max()), RELATIVE_BOUND * float(logits.abs().max()),
                int((found[name].argmax(1) == logits.argmax(1)).sum()), len(logits))
        for name, (_, logits) in expected.items()
    ]  # fmt: skip
