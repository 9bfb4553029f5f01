"""``vtk analyze``: why a model behaves as it does, as JSON, plots and one report."""

import os
import shlex

from vtk import console
from vtk.analysis.config import AnalyzeCommand
from vtk.commands import _cli

_DESCRIPTION = """Why a model behaves as it does, and what to change: its attention, features, loss, robustness.

Every diagnostic is measured on the same images, drawn, read in plain words, and put into one report.html that needs no
network. A model without what a diagnostic looks at (a ResNet has no attention) gets a line that says so."""


def main(argv: list[str]) -> int:
    """Run ``vtk analyze``; exit code 5 where a diagnostic named one by one could not be done."""
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
    if int(os.environ.get("RANK", "0")):  # of several processes the main one prints
        return 0
    console.emit_json(result.to_dict())
    return 5 if result.missing else 0
