"""Equal bytes are kept once: the packs of the best and of the last epoch are often the same."""

import contextlib
import filecmp
import os
from pathlib import Path


def keep_one_copy(kept: Path, other: Path) -> None:
    """Let the files of ``other`` that equal those of ``kept`` be the same files on the disk, by hard links.

    Both names stay, for whoever reads them. Our own writers replace files and change none in place, so neither name
    changes with the other. Where a disk has no hard links, or the two are on different ones, there are two copies.

    Args:
        kept: a file or a folder.
        other: another one of the same kind.
    """
    pairs = [(kept, other)] if other.is_file() else [(kept / path.name, path) for path in sorted(other.iterdir())]
    for one, two in pairs:
        if not one.is_file() or not two.is_file() or one.samefile(two) or not filecmp.cmp(one, two, shallow=False):
            continue
        tmp = two.with_name(f"{two.name}.tmp-{os.getpid()}")
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
            os.link(one, tmp)
            os.replace(tmp, two)
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
