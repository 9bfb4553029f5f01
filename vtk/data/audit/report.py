"""`vtk.audit`: scans a set of images, prints the audit and writes its page."""

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
    """Decode every image of a set once, print what training would use, and write the page ``config.out``.

    Args:
        folder: with train/ and val/, or with one folder per class, or a table of labels; with ``multi_label`` a table
            or label folders.
        config: options of reading, and the page; by default no page is written.

    Returns:
        The audit: classes, split, unreadable files with the reason, sizes and modes.

    Raises:
        DataError: no images, unknown layout, a page that cannot be written, an unreadable file with
            ``on_bad_image="fail"``, or a leak with ``on_leak="fail"``; the page is written first.
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
