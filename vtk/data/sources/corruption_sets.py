"""Finds the parts of a corrupted test set as it is published: ImageNet-C's folders and CIFAR-C's arrays.

ImageNet-C (Hendrycks and Dietterich 2019) is ``CORRUPTION/SEVERITY/CLASS/…``, severities 1 to 5; its archives may stay
in folders of their own (``noise/gaussian_noise/1/…``). CIFAR-10-C and CIFAR-100-C are ``CORRUPTION.npy``, the test
images at severity 1, then at 2, and so on, beside ``labels.npy``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vtk.data.sources.listing import folders, is_hidden, natural
from vtk.errors import DataError
from vtk.text import one_line

SEVERITIES = ("1", "2", "3", "4", "5")
STANDARD = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
"""The corruptions of the mean corruption error; others, as the four that the authors add, do not count for it."""
LABELS = "labels.npy"
_EXPECTED = (
    "expected CORRUPTION/SEVERITY/CLASS folders (ImageNet-C), or CORRUPTION.npy files beside labels.npy (CIFAR-C)"
)


@dataclass(frozen=True)
class CorruptionSet:
    """A corruption.

    Attributes:
        name: such as ``gaussian_noise``.
        path: folder of severities, or the array.
        severities: that it has, in order.
    """

    name: str
    path: Path
    severities: tuple[str, ...]

    @property
    def is_array(self) -> bool:
        """Whether the images are one array."""
        return self.path.suffix == ".npy"


def find_corruptions(root: Path) -> list[CorruptionSet]:
    """Return the corruptions of a folder: those of the mean corruption error in its order, then others by name.

    Raises:
        DataError: the folder is absent, has neither layout, or has a corruption twice.
    """
    if not root.is_dir():
        raise DataError(f"{root} is no folder; {_EXPECTED}")
    if (root / LABELS).exists():
        arrays = [path for path in sorted(root.glob("*.npy")) if path.name != LABELS and not is_hidden(path.name)]
        found = [CorruptionSet(path.stem, path, SEVERITIES) for path in arrays]
    else:
        found = [each for name in folders(root) for each in _of_folder(root / name) or _inside(root / name)]
    if not found:
        near = folders(root)
        has = f"has {', '.join(map(one_line, near[:5]))}" if near else "has no folders"
        raise DataError(f"{root} {has}, and no corruptions; {_EXPECTED}")
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{root} has the corruption {one_line(twice)} twice; give a folder with one of them")
    rank = {name: i for i, name in enumerate([*STANDARD, *natural({*names} - {*STANDARD})])}
    return sorted(found, key=lambda each: rank[each.name])


def passed_over(root: Path, found: Sequence[CorruptionSet]) -> list[tuple[str, str]]:
    """Return the folders of ``root`` that are no corruptions, and why: they are not evaluated.

    Args:
        root: the folder.
        found: by `find_corruptions` in it.
    """
    taken = {each.path for each in found}
    if any(each.is_array for each in found):
        return [(name, "a folder beside the arrays") for name in folders(root)]
    rest = []
    for name in folders(root):
        if root / name in taken:
            continue
        inside = folders(root / name)
        if any(root / name / each in taken for each in inside):  # an archive's folder
            others = [each for each in inside if root / name / each not in taken]
            rest += [(f"{name}/{each}", _why_not(root / name / each)) for each in others]
        else:
            rest.append((name, _why_not(root / name)))
    return rest


def _why_not(folder: Path) -> str:
    inside = folders(folder)
    levels = [name for name in inside if name in SEVERITIES]
    if not levels:
        return "it has no severities, folders 1 to 5"
    if others := [name for name in inside if name not in SEVERITIES]:
        return f"it has {one_line(others[0])} beside its severities"
    return f"severity {next(name for name in levels if not folders(folder / name))} has no class folders"


def _inside(folder: Path) -> list[CorruptionSet]:
    return [each for name in folders(folder) for each in _of_folder(folder / name)]


def _of_folder(folder: Path) -> list[CorruptionSet]:
    """Return the corruption of a folder that has nothing but severities in it, else nothing."""
    levels = folders(folder)
    if not levels or not {*levels} <= {*SEVERITIES} or not all(folders(folder / level) for level in levels):
        return []
    return [CorruptionSet(folder.name, folder, tuple(level for level in SEVERITIES if level in levels))]
