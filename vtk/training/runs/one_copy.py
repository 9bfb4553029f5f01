"""Equal bytes are kept once: the packs of the best and of the last epoch are often the same.

A file gets a second name (a hard link). Both names stay, for whoever reads them. Our own writers replace files and
change none in place, so neither name changes with the other. Where a disk has no hard links there are two copies.
"""

import contextlib
import filecmp
import os
import shutil
from pathlib import Path

from vtk.files import replace_file


def keep_one_copy(kept: Path, other: Path) -> None:
    """Let the files of the folder ``other`` that equal those of ``kept``, of the same names, be the same files."""
    for two in sorted(other.iterdir()):
        one = kept / two.name
        if one.is_file() and two.is_file() and not one.samefile(two) and filecmp.cmp(one, two, shallow=False):
            take_copy(one, two)


def take_copy(one: Path, two: Path) -> None:
    """Replace the file ``two`` by ``one``, under both names.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    with replace_file(two) as tmp:
        tmp.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.link(one, tmp)
            return
        shutil.copyfile(one, tmp)
