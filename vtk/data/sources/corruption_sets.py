"""Finds the parts of a corrupted test set as it is published: ImageNet-C's folders and CIFAR-C's arrays.

ImageNet-C (Hendrycks and Dietterich 2019) is ``CORRUPTION/SEVERITY/CLASS/…``, severities 1 to 5; its archives may stay
in folders of their own (``noise/gaussian_noise/1/…``). CIFAR-10-C and CIFAR-100-C are ``CORRUPTION.npy``, the test
images at severity 1, then at 2, and so on, beside ``labels.npy``.
"""

from dataclasses import dataclass
from pathlib import Path

from vtk.data.sources.listing import folders, natural
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
        arrays = [path for path in sorted(root.glob("*.npy")) if path.name != LABELS]
        found = [CorruptionSet(path.stem, path, SEVERITIES) for path in arrays]
    else:
        found = _of_folders(root)
        groups = {*folders(root)} - {each.name for each in found}
        found += [each for name in natural(groups) for each in _of_folders(root / name)]
    if not found:
        near = folders(root)
        has = f"has {', '.join(map(one_line, near[:5]))}" if near else "has no folders"
        raise DataError(f"{root} {has}, and no corruptions; {_EXPECTED}")
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{root} has the corruption {one_line(twice)} twice; give a folder with one of them")
    rank = {name: i for i, name in enumerate([*STANDARD, *natural({*names} - {*STANDARD})])}
    return sorted(found, key=lambda each: rank[each.name])


def _of_folders(root: Path) -> list[CorruptionSet]:
    """Return the folders in a folder that have nothing but severities in them."""
    inside = {name: folders(root / name) for name in folders(root)}
    return [
        CorruptionSet(name, root / name, tuple(level for level in SEVERITIES if level in levels))
        for name, levels in inside.items()
        if levels and {*levels} <= {*SEVERITIES} and all(folders(root / name / level) for level in levels)
    ]
