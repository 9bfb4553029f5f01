"""``vtk predict``: labels for images, from a pack, a checkpoint or an ONNX file."""

import contextlib

from vtk import console
from vtk.commands import _cli
from vtk.evaluation.config import PredictCommand

_DESCRIPTION = """Label an image, or every image below a folder, and write a CSV file.

Size, preprocessing and class names come from the source. A file that cannot be read is named, skipped and counted."""


def main(argv: list[str]) -> int:
    """Parse, predict, print; see `vtk.runtime.predict_images`."""
    config = _cli.parse(
        PredictCommand,
        argv,
        prog="vtk predict",
        description=_DESCRIPTION,
        positional=("source", "images"),
        examples=(
            "vtk predict runs/pets/task photos --top-k 3 --out predictions.csv",
            "vtk predict exports/pets/model.onnx photos/cat.jpg",
        ),
    )
    from vtk.runtime.backend import check_backend
    from vtk.runtime.prediction import predict_images
    from vtk.runtime.source import open_source

    if config.backend is not None:
        check_backend(config.backend)

    source = open_source(config.source, base=config.base)
    for note in source.notes:
        console.say(note)
    source.require_description("predict")
    with contextlib.ExitStack() as stack:
        if source.kind != "onnx" and (config.backend or "").startswith("ort-"):
            from vtk_export.onnx import temporary_onnx

            source = stack.enter_context(temporary_onnx(source))
        result = predict_images(source, config)
    console.emit_json(result.to_dict())
    return 0
