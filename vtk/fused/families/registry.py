"""The known families, and which of them a model is of."""

from typing import Any

from torch import nn

from vtk.errors import UsageError
from vtk.fused.families.beit import BeitReader
from vtk.fused.families.distilled import DistilledReader
from vtk.fused.families.eva import EvaReader
from vtk.fused.families.reader import Reader
from vtk.fused.families.relpos import RelPosReader
from vtk.fused.families.vision_transformer import VisionTransformerReader

READERS: tuple[Reader, ...] = (
    BeitReader(), DistilledReader(), EvaReader(), RelPosReader(), VisionTransformerReader(),
)  # fmt: skip
"""Those of subclasses before those of their bases."""


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
    names = " and ".join(reader.kind.__name__ for reader in reversed(READERS))
    raise UsageError(
        f"cannot fuse {kind.__name__}: only timm's {names} (vit_*, deit_*, eva02_* and others) are known; use the "
        "back-end eager or compile, or export without --fuse"
    )
