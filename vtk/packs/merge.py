"""Merges a pack and its base into one checkpoint, which plain timm loads strictly where it has the architecture.

Of a folder that timm and transformers load by a name alone: `vtk.packs.merged_folder`.
"""

from pathlib import Path

from vtk.errors import DataError, UsageError
from vtk.files import replace_file, write_text
from vtk.formats import save_tensors
from vtk.nodes import check_file
from vtk.options.config import set_value
from vtk.packs.checkpoint_readme import IS_MERGED, merged_page, page_beside
from vtk.packs.config import MergeConfig, MergeFormat
from vtk.packs.load import Task, card_metadata, load_task
from vtk.packs.merged_folder import merge_folder


def merge_task(
    path: str | Path,
    out: str | Path,
    *,
    format: MergeFormat = "file",
    base: str | Path | None = None,
    overwrite: bool = False,
) -> Task:
    """Write ``out`` (.safetensors, fp32, timm's keys, the card in its metadata) and ``NAME.README.md`` beside it.

    `vtk.packs.plain.plain_call` and the README give the call of plain timm that loads it, if there is one.

    Args:
        path: the pack.
        out: file to write.
        format: ``file``; with ``timm`` or ``hf``, ``out`` is a folder (`vtk.packs.merged_folder.merge_folder`).
        base: file with the base weights; by default they are looked up.
        overwrite: replace an existing file.

    Raises:
        UsageError: ``out`` is not a .safetensors file, or exists; or an unknown ``format``.
        DataError: the pack is damaged, ``out`` cannot be written, or beside it is a README of this name that another
            program wrote.
        BaseError: no base fits.
    """
    wanted: MergeFormat = set_value(MergeConfig, "format", format)
    if wanted != "file":
        return merge_folder(path, out, wanted, base=base, overwrite=overwrite)[0]
    out = Path(out)
    if out.suffix != ".safetensors":
        raise UsageError(f"`--out` {out}: a merged checkpoint is a .safetensors file; --format timm writes a folder")
    check_file(out)
    if out.exists() and not overwrite:
        raise UsageError(f"`--out` {out} exists; choose another name, or --overwrite")
    page = page_beside(out)
    check_file(page)
    if page.exists() and not IS_MERGED(page):
        raise DataError(f"{page} was not written by `vtk tasks merge`, so it stays; choose another name for `--out`")
    task = load_task(path, base=base)
    with replace_file(out) as tmp:
        save_tensors(tmp, task.model.state_dict(), card_metadata(task.card.merged()))
    write_text(page, merged_page(task.card, out.name))
    return task
