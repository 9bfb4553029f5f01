"""``RUN/images.csv``: the training and held-out images of a run, with a digest of each one's content.

People read it, and ``--resume`` says with it which image is another than the run started with.
"""

import csv
import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from vtk.data.audit.result import DataAudit
from vtk.data.record import content_lines
from vtk.files import write_text
from vtk.text import one_line

IMAGES = "images.csv"
_HEAD = ("part", "path", "content")


def images_digest(audit: DataAudit) -> str:
    """Return the sha256 of all images of a run: part, path, content and labels of each, in any order."""
    labels = [_labels(audit, sample.label) for sample in audit.samples]
    lines = sorted("\0".join((*line, *own)) for line, own in zip(content_lines(audit), labels, strict=True))
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _labels(audit: DataAudit, label: Any) -> list[str]:
    """Return the names of an image's labels; none of images without classes."""
    if not audit.classes:
        return []
    numbers = label.nonzero()[0] if isinstance(label, np.ndarray) else [label]
    return [audit.classes[number] for number in numbers]


def write_images(out: Path, audit: DataAudit) -> None:
    """Write the table; ``content`` is the beginning of the sha256 of the file's bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEAD)
    # a name that is no text is shown with escapes
    writer.writerows((part, name.encode("utf-8", "backslashreplace").decode(), digest)
                     for part, name, digest in content_lines(audit))  # fmt: skip
    write_text(out / IMAGES, text.getvalue())


def describe_change(out: Path, audit: DataAudit) -> str:
    """Describe how the images differ from the table in ``out``; empty where it has no answer."""
    try:
        with (out / IMAGES).open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        before = {name: (part, digest) for part, name, digest in rows}
    except Exception:  # it only helps to say more; the digests have been compared
        return ""
    now = {
        name.encode("utf-8", "backslashreplace").decode(): (part, digest) for part, name, digest in content_lines(audit)
    }
    both = [name for name in before if name in now]
    kinds = {
        "is another image now": [n for n in both if before[n][1] != now[n][1]],
        "is gone": [n for n in before if n not in now],
        "is new": [n for n in now if n not in before],
        "is in the other part now": [n for n in both if before[n][1] == now[n][1] and before[n] != now[n]],
    }
    count = sum(map(len, kinds.values()))
    if not count:
        return ""
    why, names = next((why, names) for why, names in kinds.items() if names)
    others = ", ".join(f"{len(more)} {kind.replace('is ', 'are ')}" for kind, more in kinds.items() if more)
    detail = f": {others}" if len([more for more in kinds.values() if more]) > 1 else ""
    are = "s are" if count > 1 else " is"
    return (
        f"{count} image{are} not as when the run started with {len(before)}{detail}; for example "
        f"{one_line(names[0])} {why}"
    )
