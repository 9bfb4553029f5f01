"""``audit``: a folder of images looked at before anything is trained on it, and the page that shows it."""

from pathlib import Path
from typing import Any

from vtk import console
from vtk.data.audit.folder_scan import scan
from vtk.data.audit.multilabel_scan import scan_multi
from vtk.data.audit.page import check_page, write_page
from vtk.data.audit.result import DataAudit
from vtk.data.config import AuditConfig
from vtk.errors import DataError
from vtk.options import expect


def audit(folder: str | Path, config: AuditConfig | None = None) -> DataAudit:
    """Decode every image of a folder once, say what training would make of it, and write the page of ``config.out``.

    Args:
        folder: with train/ and val/, or with one folder per class, or a table of labels; with ``multi_label`` a table
            or label folders.
        config: how it is read, and where the page goes; by default there is none.

    Returns:
        Classes, split, unreadable files with the reason, sizes and modes.

    Raises:
        DataError: no images or no layout that is known, a page that cannot be written, or, with
            ``on_bad_image="fail"``, a file that cannot be read, or, with ``on_leak="fail"``, a held-out image that is
            in the training part, too; the page is written before.
    """
    config = config or AuditConfig()
    expect(config, AuditConfig, "audit")
    folder = Path(folder)
    if config.out is not None:
        check_page(config.out, overwrite=config.overwrite)
    arguments: dict[str, Any] = {
        "val_split": config.val_split, "seed": config.seed, "in_chans": config.in_chans,
        "max_pixels": config.max_pixels, "workers": config.workers, "cache": config.cache,
        "value_range": config.value_range,
        "field_separator": config.field_separator,
    }  # fmt: skip
    if config.multi_label:
        found: DataAudit = scan_multi(folder, label_separator=config.label_separator, **arguments)
    else:
        found = scan(folder, keep_empty_classes=config.keep_empty_classes, **arguments)
    found.print()
    if config.out is not None:
        write_page(config.out, found)
        console.say(f"page {config.out}")
    if found.bad and config.on_bad_image == "fail":
        shown = f"{config.out} shows them" if config.out is not None else f"the first is {found.bad[0].path}"
        raise DataError(
            f"{len(found.bad)} files of {folder} cannot be read, and --on-bad-image is fail; {shown}; repair or remove "
            "them"
        )
    if config.on_leak == "fail":
        found.copies.refuse_leaks(folder)
    return found
