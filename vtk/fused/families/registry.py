"""The known families, and which of them a model is of."""

from typing import Any

from timm.models.levit import Levit
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from vtk.errors import UsageError
from vtk.fused.families.beit import BeitReader
from vtk.fused.families.eva import EvaReader
from vtk.fused.families.naflex import NaFlexReader
from vtk.fused.families.reader import Reader
from vtk.fused.families.relpos import RelPosReader
from vtk.fused.families.vision_transformer import DistilledReader, VisionTransformerReader

READERS: tuple[Reader, ...] = (
    BeitReader(), DistilledReader(), EvaReader(), NaFlexReader(), RelPosReader(), VisionTransformerReader(),
)  # fmt: skip
"""Those of subclasses before those of their bases."""

_WHY = {
    Levit: "its stages have fewer tokens one after another, and blocks that change their number",
    VisionTransformerSAM: "its attention is over windows of the image, with a bias that the queries make",
}
"""What is in the way of other models of plain blocks."""


def reader_of(model: Any) -> Reader:
    """Return the reader of a model, which has passed its check.

    Raises:
        UsageError: no module, a class of another family, or a model that computes something of its own.
    """
    kind = type(model)
    if not isinstance(model, nn.Module):
        raise UsageError(f"`fuse` takes a timm Vision Transformer as a module, and was given a {kind.__name__}; of a "
                         "task, give its `.model`")  # fmt: skip
    for reader in READERS:
        if isinstance(model, reader.kind):
            reader.check(model)
            return reader
    first, *others = (reader.kind.__name__ for reader in reversed(READERS))
    why = f"only timm's {first}, {', '.join(others[:-1])} and {others[-1]} are known"
    why = next((reason for known, reason in _WHY.items() if isinstance(model, known)), why)
    raise UsageError(f"cannot fuse {kind.__name__}: {why}; use the back-end eager or compile, or export without --fuse")
