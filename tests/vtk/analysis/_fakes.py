"""Made-up diagnostics under real names, and analyses of them, for the report and for runs without a model."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture
from vtk.analysis.result_files import Analysis


def fake(
    name: str, measure: Callable[[Context], dict[str, Any]] = lambda context: {"value": 1.0}, **more
) -> Diagnostic:
    def draw(runs):
        figure, (axes,) = figures.new()
        for colour, run in zip(figures.COLOURS, runs, strict=False):
            axes.plot([0, 1], [0, run.result["value"]], color=colour, label=figures.label(run.label))
        figures.finish(axes, x="depth", y="value", legend=True)
        return [Picture(name, figure, f"A line for each of {' and '.join(run.label for run in runs)}.")]

    fields = {
        "title": f"The {name}", "source": "paper Z, Figure 9", "explains": "High is much.", "measure": measure,
        "draw": draw, "read": lambda result: [f"It is {result['value']}.", *result.get("more", [])],
        "numbers": lambda result: {"value, m": result["value"]},
    }  # fmt: skip
    return Diagnostic(name, **{**fields, **more})


def context(**options) -> Any:
    """A context for diagnostics that look at nothing; ``saved`` and ``save`` are replaced by the run."""
    config = SimpleNamespace(**{"seed": 0, "batch_size": 32, "grid": 11, **options})
    return Context(
        model=None, spec=None, classes=("a", "b"), multi_label=False, device=None, config=config, loader=None,
        augmented=None, count=4,
    )  # fmt: skip


def analysis(label: str = "one", results: dict[str, Any] | None = None, **more) -> Analysis:
    results = {"entropy": {"value": 1.5}} if results is None else results
    facts = {
        "model": "vit_x", "images": "64 of --split val", "images digest": "abc", "command": "vtk analyze x",
        "date": "2026-01-02", "versions": "vtk 1", "options": {name: {"seed": 0} for name in results},
        **more.pop("facts", {}),
    }  # fmt: skip
    return Analysis(label, results, dict.fromkeys(results, 2.25), more.pop("refused", {}), facts, 123_400_000)
