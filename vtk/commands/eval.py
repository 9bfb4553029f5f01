"""``vtk eval``: accuracy of a pack, a checkpoint or an ONNX file on a folder of images."""

from vtk import console
from vtk.commands import _cli
from vtk.evaluation.config import EvalCommand

_DESCRIPTION = """Evaluate a task pack, a merged checkpoint or an exported file on a folder of images.

Size, preprocessing and class names come from the source; class folders are matched by name. Without further
options a pack runs in its training precision and batch size, and reproduces the metric of its training run exactly."""


def main(argv: list[str]) -> int:
    """Parse, evaluate, print; see `vtk.evaluate`."""
    config = _cli.parse(
        EvalCommand,
        argv,
        prog="vtk eval",
        description=_DESCRIPTION,
        positional=("source", "data"),
        examples=(
            "vtk eval runs/pets/task data/pets",
            "vtk eval exports/pets/model.onnx data/pets --reference runs/pets/task --out eval/pets",
        ),
    )
    from vtk.answers import evaluate

    result = evaluate(config.source, config, base=config.base, trust=config.trust)
    console.emit_json(result.to_dict())
    return 0
