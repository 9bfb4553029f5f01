"""The terminal's view of an analysis: headline numbers and what they mean."""

from collections.abc import Sequence

from vtk import console
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.run import Analysis


def print_analyses(analyses: Sequence[Analysis]) -> None:
    """Print the headline numbers of one analysis or two side by side; of one also its readings."""
    rows = []
    for name, numbers in headline(analyses).items():
        for number, values in numbers.items():
            rows.append((name, number, *("–" if v is None else f"{v:.4g}" for v in values)))
            name = ""
    console.table("", ("diagnostic", "number", *(one.label for one in analyses)), rows, left=(0, 1))
    if len(analyses) > 1:
        return
    (only,) = analyses
    for name, result in only.results.items():
        for sentence in diagnostic(name).read(result):
            console.say(f"{name}: {sentence}")


def headline(analyses: Sequence[Analysis]) -> dict[str, dict[str, list[float | None]]]:
    """Return by diagnostic and number the value of each analysis, None where it has none."""
    names = dict.fromkeys(name for one in analyses for name in one.results)
    found: dict[str, dict[str, list[float | None]]] = {}
    for name in names:
        own = [diagnostic(name).numbers(one.results[name]) if name in one.results else {} for one in analyses]
        keys = dict.fromkeys(key for numbers in own for key in numbers)
        found[name] = {key: [numbers.get(key) for numbers in own] for key in keys}
    return found
