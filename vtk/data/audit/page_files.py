"""Sections of the audit's page: unused files, and duplicate images."""

from collections.abc import Callable, Sequence

from vtk.data.audit.copies import Group
from vtk.data.audit.result import DataAudit
from vtk.data.audit.unusual import SHOWN, UnusualImage
from vtk.html import text

_OF_A_GROUP = 4  # most files shown of one image

STYLE = """
.group { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .5rem; margin: .7rem 0;
  border-left: 4px solid var(--line); padding-left: .6rem } .leak { border-color: var(--held) }
details { margin: .3rem 0 } summary { cursor: pointer } details p { font-size: .85rem }
"""


def files(audit: DataAudit) -> str:
    """Return the section that accounts for all files, with the names of unused ones folded."""
    if audit.seen == len(audit.samples) and not audit.copies.groups:
        return ""
    parts = [f"<h2>Files</h2><p>{text(audit.account())}</p>"]
    left = audit.left
    for suffix, names in left.listed.items():
        parts.append(_fold(f"{suffix}: {left.suffixes[suffix]:,}, no image suffix", names, left.suffixes[suffix]))
    if left.loose:
        parts.append(_fold(f"{left.loose:,} outside class folders", left.loose_listed, left.loose))
    if left.special:
        parts.append(_fold(f"{len(left.special):,} not regular files", left.special, len(left.special)))
    if left.unused:
        lines = [f"{name}/ ({count:,} files)" for name, count in left.unused.items()]
        parts.append(_fold("Unused folders", lines, len(lines)))
    return "\n".join(parts)


def copies(audit: DataAudit, figure: Callable[[UnusualImage], str]) -> str:
    """Return the sections of duplicate images.

    Args:
        audit: the audit.
        figure: returns the HTML of one image.
    """
    found = audit.copies
    across = [pair for pair in found.near if pair[0].part != pair[1].part]
    within = [pair for pair in found.near if pair[0].part == pair[1].part]
    leaks = found.leaks
    known = set(leaks)
    conflicts = [group for group in found.conflicts if group not in known]
    known |= set(conflicts)
    rest = [group for group in found.groups if group not in known]
    sections: list[tuple[str, int, str, Sequence[Group]]] = [
        (
            "Held-out images in the training part",
            len(leaks),
            "Byte-identical files: they make held-out metrics too good.",
            leaks,
        ),
        ("Held-out images similar to training images", found.near_leaked, _ALIKE, across),
        ("Duplicates with different labels", len(conflicts), "Byte-identical files with different labels.", conflicts),
        ("Duplicates", len(rest), "Byte-identical files; each counts as an image.", rest),
        ("Similar images within a part", found.near_within, _ALIKE, within),
    ]
    parts = []
    for title, count, note, groups in sections:
        if not groups:
            continue
        shown = f", {min(len(groups), SHOWN)} shown" if count > min(len(groups), SHOWN) else ""
        parts.append(f"<h2>{title} <span class=dim>({count:,}{shown})</span></h2><p class=dim>{note}</p>")
        parts += [_group(group, figure) for group in groups[:SHOWN]]
    return "\n".join(parts)


_ALIKE = "Near duplicates by a difference hash; check whether they show the same picture. They are never refused."


def _group(group: Group, figure: Callable[[UnusualImage], str]) -> str:
    train = [placed for placed in group if placed.part == "train"]
    val = [placed for placed in group if placed.part == "val"]
    chosen = [*train[:1], *val[:1], *train[1:], *val[1:]][:_OF_A_GROUP]
    part = {"train": "train", "val": "held out"}
    figures = [figure(UnusualImage(p.name, p.of_class, f"{part[p.part]} · {p.of_class or 'no label'}")) for p in chosen]
    more = f"<p class=dim>and {len(group) - len(chosen):,} more</p>" if len(group) > len(chosen) else ""
    tone = " leak" if train and val else ""
    return f'<div class="group{tone}">{"".join(figures)}{more}</div>'


def _fold(title: str, names: Sequence[str], total: int) -> str:
    more = f" … and {total - len(names):,} more" if total > len(names) else ""
    return f"<details><summary>{text(title)}</summary><p>{'<br>'.join(map(text, names))}{more}</p></details>"
