"""``vtk eval``: accuracy of a pack, a checkpoint or an ONNX file on a folder of images."""

import contextlib

from vtk import console
from vtk.commands import _cli
from vtk.evaluation.config import EvalCommand

_DESCRIPTION = """Evaluate a task pack, a merged checkpoint or an .onnx on a folder of images.

Size, preprocessing and class names come from the source; class folders are matched by name. With no further flags a
pack is run in its training precision and batch size, and gives the metric of its training run exactly."""


def main(argv: list[str]) -> int:
    """Parse, evaluate, print; see `vtk.runtime.evaluate_source`."""
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
    from vtk.runtime.backend import check_backend
    from vtk.runtime.evaluation import evaluate_source
    from vtk.runtime.source import open_source

    if config.backend is not None:
        check_backend(config.backend)

    source = open_source(config.source, base=config.base)
    reference = None if config.reference is None else open_source(config.reference)
    for note in (*source.notes, *(reference.notes if reference else ())):
        console.say(note)
    source.require_description("eval")
    with contextlib.ExitStack() as stack:
        if source.kind != "onnx" and (config.backend or "").startswith("ort-"):
            from vtk_export.onnx import temporary_onnx

            reference = reference or source
            source = stack.enter_context(temporary_onnx(source))
        result = evaluate_source(source, config, reference=reference)
    console.emit_json(result.to_dict())
    return 0
