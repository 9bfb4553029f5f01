"""Corruption errors (Hendrycks and Dietterich 2019): errors by corruption and severity, relative to a baseline's.

The corruption error of a corruption is the model's error summed over severities, divided by the baseline's; the mean
corruption error (mCE) is its mean over the 15 corruptions. Without a baseline the errors themselves are averaged, as is
usual for CIFAR-C.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vtk import console
from vtk.data.sources.corruption_sets import SEVERITIES, STANDARD
from vtk.errors import DataError
from vtk.formats import read_json
from vtk.text import one_line

ALEXNET = dict(zip(STANDARD, (
    0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816, 0.826572, 0.819324, 0.564592,
    0.853204, 0.646056, 0.717840, 0.606500,
), strict=True))  # fmt: skip
"""AlexNet's errors on ImageNet-C, means over the five severities, as the authors publish them."""
IMAGENET = 1000
"""Classes that AlexNet's errors are of."""

Errors = Mapping[str, Mapping[str, float]]
"""Corruption → severity → error."""


@dataclass(frozen=True)
class Baseline:
    """Errors that others are divided by.

    Attributes:
        name: in reports, such as ``alexnet``.
        means: by corruption, of the five severities together; or
        errors: by corruption and severity.
        images: number of images, by corruption and severity, where it is known.
        restricted: number of classes that it chose from, with ``--restrict``; None for all.
    """

    name: str
    means: Mapping[str, float] | None = None
    errors: Errors | None = None
    images: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    restricted: int | None = None

    def relative(self, name: str, own: Mapping[str, float]) -> float | None:
        """Return the corruption error of a corruption; None where the baseline has not all of its severities.

        Args:
            name: of the corruption.
            own: errors by severity.
        """
        if self.means is not None:
            mean = self.means.get(name)
            return None if mean is None or {*own} != {*SEVERITIES} else sum(own.values()) / (len(own) * mean)
        theirs = (self.errors or {}).get(name, {})
        total = sum(theirs.get(level, 0.0) for level in own)
        return None if not {*own} <= theirs.keys() or not total else sum(own.values()) / total


def read_baseline(given: str) -> Baseline:
    """Return AlexNet's errors, or those of an earlier ``corruptions.json``.

    Raises:
        DataError: the file is absent or is not one.
    """
    if given == "alexnet":
        return Baseline("alexnet", means=ALEXNET)
    path = Path(given) / "corruptions.json" if Path(given).is_dir() else Path(given)
    found = read_json(path)
    wrong = DataError(f"`--baseline` {path} is no corruptions.json of `vtk eval --corrupted`; give one, or alexnet")
    if not isinstance(found, dict) or not isinstance(found.get("corruptions"), dict):
        raise wrong
    errors: dict[str, dict[str, float]] = {}
    images: dict[str, dict[str, int]] = {}
    for name, levels in found["corruptions"].items():
        if not isinstance(levels, dict):
            raise wrong
        for level, numbers in levels.items():
            top1 = numbers.get("top1") if isinstance(numbers, dict) else None
            if level not in SEVERITIES or not isinstance(top1, (int, float)) or not 0 <= top1 <= 1:
                raise wrong
            errors.setdefault(name, {})[level] = 1 - top1
            if isinstance(count := numbers.get("count"), int):
                images.setdefault(name, {})[level] = count
    restricted = found.get("restricted")
    if restricted is not None and not isinstance(restricted, int):
        raise wrong
    return Baseline(str(found.get("source") or path), errors=errors, images=images, restricted=restricted)


@dataclass(frozen=True)
class CorruptionSummary:
    """Means over a corrupted test set.

    Attributes:
        mean_top1: accuracy, over all corruptions and severities.
        standard_top1: the same over the 15 corruptions of the mCE; None where one of them or a severity is absent.
        relative: corruption → its error as a share of the baseline's, where both have it.
        mce: mean of ``relative`` over the 15; None without a baseline or without one of them.
    """

    mean_top1: float
    standard_top1: float | None
    relative: Mapping[str, float]
    mce: float | None


def summarize(errors: Errors, baseline: Baseline | None) -> CorruptionSummary:
    """Return the means of errors by corruption and severity; every corruption counts the same."""
    means = {name: sum(levels.values()) / len(levels) for name, levels in errors.items()}
    whole = all({*errors.get(name, {})} == {*SEVERITIES} for name in STANDARD)
    found = {} if baseline is None else {name: baseline.relative(name, levels) for name, levels in errors.items()}
    relative = {name: value for name, value in found.items() if value is not None}
    mce = sum(relative[name] for name in STANDARD) / len(STANDARD) if {*STANDARD} <= relative.keys() and whole else None
    standard = 1 - sum(means[name] for name in STANDARD) / len(STANDARD) if whole else None
    return CorruptionSummary(1 - sum(means.values()) / len(means), standard, relative, mce)


def print_errors(errors: Errors, summary: CorruptionSummary, baseline: Baseline | None) -> None:
    """Print a line per corruption, the means, and the baseline that the mCE is relative to."""
    rows = []
    for name, levels in errors.items():
        cells = [f"{100 * (1 - levels[level]):.1f}" if level in levels else "" for level in SEVERITIES]
        relative = summary.relative.get(name)
        rows.append((one_line(name), *cells, "" if relative is None else f"{100 * relative:.1f}"))
    heads = ("corruption", *SEVERITIES, *(() if baseline is None else ("CE",)))
    console.table("Accuracy by severity, %", heads, [row[: len(heads)] for row in rows])
    count = console.count(len(errors), "corruption")
    console.say(f"mean accuracy {console.percent(summary.mean_top1)} over {count}")
    if summary.standard_top1 is not None and len(errors) > len(STANDARD):
        of = f"the {len(STANDARD)} corruptions of the mCE"
        console.say(f"mean accuracy {console.percent(summary.standard_top1)} over {of}")
    if baseline is None:
        return
    if summary.mce is not None:
        console.say(f"mean corruption error (mCE) {100 * summary.mce:.1f} %, relative to the errors of {baseline.name}")
        return
    lacking = [name for name in STANDARD if name not in summary.relative]
    console.say(
        f"no mean corruption error: it is of {len(STANDARD)} corruptions at severities 1 to 5, and here or in "
        f"{baseline.name} {', '.join(lacking[:3]) or 'a severity'}{' and others' if len(lacking) > 3 else ''} is not "
        "complete, or the baseline makes no error"
    )
