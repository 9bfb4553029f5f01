"""``vtk analyze``: diagnostics of a model as JSON, plots and one report."""

import os
import shlex

from vtk import console
from vtk.analysis.config import AnalyzeCommand
from vtk.commands import _cli

_DESCRIPTION = """Diagnose a model and suggest changes: attention, features, loss landscape, robustness.

All diagnostics use the same images. Each is plotted and explained in plain words, in one self-contained report.html.
A diagnostic that does not apply (a ResNet has no attention) is reported as skipped."""


def main(argv: list[str]) -> int:
    """Run ``vtk analyze``; exit code 5 if a diagnostic named by --what could not run."""
    config = _cli.parse(
        AnalyzeCommand,
        argv,
        prog="vtk analyze",
        description=_DESCRIPTION,
        positional=("model",),
        examples=(
            "vtk analyze runs/pets/task --data data/pets --out analysis/pets",
            "vtk analyze runs/pets/task --data data/pets --what entropy,hessian --out analysis/some",
            "vtk analyze --compare vit_small_patch14_dinov2 runs/pets/task --data data/pets --what features",
            "vtk analyze --compare analysis/before analysis/after --out analysis/both",
            "torchrun --standalone --nproc_per_node 2 -m vtk analyze runs/pets/task --data data/pets --what loss",
        ),
    )
    from vtk.analysis.analyze import analyze

    first, second = config.compare or (config.model, None)
    command = shlex.join(["vtk", "analyze", *argv])
    result = analyze(first, config, against=second, command=command, **config.opening())
    if int(os.environ.get("RANK", "0")):  # only the main process prints
        return 0
    console.emit_json(result.to_dict())
    return 5 if result.missing else 0
