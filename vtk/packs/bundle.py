"""Writes packs in other forms: with the base tensors (a bundle), or in another precision.

A bundle is a folder, not an archive: a pack with one more file, `base.safetensors`. So every reader of packs reads
bundles, and weights can be mapped into memory without unpacking.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from vtk.card import Card
from vtk.errors import UsageError
from vtk.files import replace_dir, sweep, write_text
from vtk.formats import save_tensors
from vtk.locks import hold_name
from vtk.marks import Marks, beside, find_own, json_with
from vtk.nodes import resolve_output
from vtk.packs.adapters import README
from vtk.packs.base_files import BUNDLED, base_keys, base_start
from vtk.packs.cards import CARD, HASHES, TENSORS, read_hashes
from vtk.packs.checkpoint_readme import IS_BUNDLE, bundle_page
from vtk.packs.config import PackDtype
from vtk.packs.factors import starts_of
from vtk.packs.load import Task, load_task, needed_names
from vtk.packs.pack import write_pack
from vtk.packs.rounding import store, store_factors

_CARD = json_with("model", "input", "classes", "schema")
PACK_MARKS = {CARD: _CARD, **dict.fromkeys((HASHES, TENSORS, BUNDLED), beside(CARD, _CARD)), README: IS_BUNDLE}
"""Files of a pack or bundle, and how they are recognised."""
PACK_FILES = frozenset(PACK_MARKS) - {README}
"""Files that a pack or bundle is read from."""


def bundle_task(path: Path, out: Path, *, base: Path | None = None, overwrite: bool = False) -> Task:
    """Write a pack with the base tensors that it needs, at their stored shape and dtype.

    Args:
        path: the pack, or a bundle.
        out: folder to write; the pack's own files are copied as they are.
        base: file with the base weights; by default they are looked up.
        overwrite: replace an existing pack or bundle.

    Returns:
        The task that was read.

    Raises:
        UsageError: ``out`` exists, or holds something else.
        DataError: the pack is damaged, or ``out`` cannot be written.
        BaseError: no base fits.
    """
    with claim_out(out, PACK_MARKS, overwrite=overwrite):
        task = load_task(path, base=base)
        with replace_dir(out) as tmp:
            for name in (CARD, HASHES, TENSORS):
                shutil.copyfile(task.path / name, tmp / name)
            _write_base(tmp, task, task.needed)
            _write_page(tmp, task.card)
        return task


def convert_task(path: Path, out: Path, dtype: PackDtype, *, base: Path | None = None, overwrite: bool = False) -> Card:
    """Write a pack in another precision; a bundle stays a bundle.

    Args:
        path: the pack, or a bundle.
        out: folder to write.
        dtype: of the stored tensors; of a pack of factors, of these. Without factors, int8 stores differences from
            base tensors that a bundle lacks, so it needs ``base`` there.
        base: file with the base weights; by default they are looked up.
        overwrite: replace an existing pack or bundle.

    Returns:
        The card as written; ``pack.converted_from`` is the earlier precision, at which its metrics were measured.

    Raises:
        UsageError: ``out`` exists or holds something else, the dtype is unknown, or a bundle needs ``base``.
        DataError: the pack is damaged, or ``out`` cannot be written.
        BaseError: no base fits.
    """
    if dtype not in get_args(PackDtype):
        raise UsageError(f"`--pack-dtype` {dtype!r} is unknown; choose one of {', '.join(get_args(PackDtype))}")
    with claim_out(out, PACK_MARKS, overwrite=overwrite):
        task = load_task(path, base=base)
        assert task.base is not None
        keys, hashes = base_keys(task.card, path), read_hashes(task.path)
        stored, facts = _convert(task, dtype, keys, hashes, path)
        before = task.card.pack
        facts["converted_from"] = before.get("converted_from") or before.get("dtype", "fp32")
        kept = {key: value for key, value in before.items() if key != "drift"}
        card = dataclasses.replace(task.card, pack={**kept, **facts})
        with replace_dir(out) as tmp:
            write_pack(tmp, stored, hashes, card)
            if (task.path / BUNDLED).is_file():
                _write_base(tmp, task, task.needed if task.factors else needed_names(stored, hashes, keys))
                _write_page(tmp, card)
        return card


def _convert(
    task: Task, dtype: PackDtype, keys: Callable[[str], str | None], hashes: Collection[str], path: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the new file and the card's ``pack``."""
    assert task.base is not None
    state, trained = task.model.state_dict(), task.card.pack.get("trained", ())
    if task.factors:
        exact = {name: state[name] for name in sorted(task.carried - task.factors.keys())}
        return store_factors(
            exact, dtype, task.factors, trained=trained, starts=starts_of(task.card),
            model=lambda: task.model, spec=task.card.input,
        )  # fmt: skip
    tensors = {name: state[name].clone() for name in sorted(task.carried)}
    absent = set(hashes) - task.base.tensors.keys()
    if task.bundled and dtype == "int8" and any(v.ndim == 2 and keys(k) in absent for k, v in tensors.items()):
        raise UsageError(
            f"{path} is a bundle, which lacks the base's values of the tensors that its pack holds; int8 stores "
            "the differences from these: give --base FILE"
        )
    return store(
        tensors, dtype, trained=trained, start=base_start(task.base, keys), model=lambda: task.model,
        spec=task.card.input,
    )  # fmt: skip


@contextlib.contextmanager
def claim_out(out: Path, marks: Marks, *, overwrite: bool, command: str = "vtk tasks") -> Iterator[None]:
    """Refuse an output folder that exists; with ``overwrite``, only one that holds other files than ``marks``.

    The whole folder is replaced, so any other file in it would be lost. The name is locked against other processes.

    Raises:
        UsageError: names the file, and what to do.
        DataError: ``out`` is a device or the like, is being written, or holds a file of one of these names that
            no command of this toolkit wrote.
    """
    if resolve_output(out, f"`--out` {out}").is_file():
        raise UsageError(f"`--out` {out} is a file; give a folder")
    if out.name in ("", ".."):  # a folder is replaced under its name in the one above it
        raise UsageError(f"`--out` {out} has no name of its own; give that of a folder to write")
    with hold_name(out, command):
        sweep(out.absolute().parent, lambda name: name == out.name)
        found = {file.name for file in out.iterdir()} if out.is_dir() else set()
        if found and not overwrite:
            raise UsageError(f"`--out` {out} exists; choose another name, or --overwrite")
        if foreign := sorted(found - set(marks)):
            raise UsageError(f"`--out` {out} holds `{foreign[0]}`, which would be lost; choose another name")
        find_own(out, marks, command)
        yield


def _write_base(folder: Path, task: Task, names: Collection[str]) -> None:
    assert task.base is not None
    save_tensors(folder / BUNDLED, {k: v for k, v in task.base.tensors.items() if k in names})


def _write_page(folder: Path, card: Card) -> None:
    """Write the README of a bundle; plain timm loads neither int8, factors nor names that transforms changed."""
    whole = card.pack.get("dtype") != "int8" and not card.pack.get("factors")
    union = whole and all(t.op == "adapt_input" for t in card.transforms)
    text = bundle_page(card, BUNDLED, TENSORS, union=union)
    write_text(folder / README, text)
