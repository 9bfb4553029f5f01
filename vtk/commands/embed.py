"""``vtk embed``: pooled features of images, from a pack, a backbone or an ONNX file."""

from vtk import console
from vtk.commands import _cli
from vtk.runtime.embedding.config import EmbedCommand

_DESCRIPTION = """Write the pooled features (the classifier's input) of an image, or of every image below a folder.

Size and preprocessing come from the source. A file that cannot be read is named, skipped and counted. Rows are written
as they are computed, so a folder of any size will do."""


def main(argv: list[str]) -> int:
    """Parse, embed, print; see `vtk.embed`."""
    config = _cli.parse(
        EmbedCommand, argv, prog="vtk embed", description=_DESCRIPTION, positional=("source", "images"),
        examples=(
            "vtk embed runs/pets/task photos --out embeddings.parquet",
            "vtk embed vit_small_patch14_dinov2.lvd142m photos --img-size 224 --out embeddings.npz",
        ),
    )  # fmt: skip
    from vtk.answers import embed

    result = embed(
        config.source, config, base=config.base, pretrained=config.pretrained, weights=config.weights,
        img_size=config.img_size, trust=config.trust,
    )  # fmt: skip
    console.emit_json(result.to_dict())
    return 0
