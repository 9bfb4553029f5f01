"""``vtk predict``: labels for images, from a pack, a checkpoint or an ONNX file."""

from vtk import console
from vtk.commands import _cli
from vtk.evaluation.config import PredictCommand

_DESCRIPTION = """Predict the label of an image, or of every image below a folder; --out FILE writes a CSV file.

Size, preprocessing and class names come from the source. A file that cannot be read is named, skipped and counted."""


def main(argv: list[str]) -> int:
    """Parse, predict, print; see `vtk.predict`."""
    config = _cli.parse(
        PredictCommand, argv, prog="vtk predict", description=_DESCRIPTION, positional=("source", "images"),
        examples=(
            "vtk predict runs/pets/task photos --top-k 3 --out predictions.csv",
            "vtk predict exports/pets/model.onnx photos/cat.jpg",
        ),
    )  # fmt: skip
    from vtk.answers import predict

    result = predict(config.source, config, base=config.base, trust=config.trust)
    console.emit_json(result.to_dict())
    return 0
