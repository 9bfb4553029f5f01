"""Images for a server: their size and type, and the values of the model's other inputs."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk.profiling.server.client import ModelInfo
from vtk.profiling.server.config import ServerConfig
from vtk.runtime.source import Source


def other_inputs(info: ModelInfo, image: str, task: str | None) -> dict[str, str]:
    """Return the values of the inputs beside the images.

    Raises:
        UsageError: one is not known.
    """
    found = {}
    for other in info.inputs:
        if other.name == image:
            continue
        if other.datatype != "BYTES" or task is None:
            raise UsageError(f"`{info.name}` has an input `{other.name}` ({other.datatype}) too; give --task")
        found[other.name] = task
    return found


def spread_bytes(images: "np.ndarray[Any, Any]", kind: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
    """Return images of the server's type; bytes are spread over all of a wider one's numbers."""
    made = images.astype(kind)
    if images.dtype == np.uint8 and kind.kind in "iu":
        made *= np.iinfo(kind).max // 255 or 1
    return made


def image_spec(shape: tuple[int, ...], config: ServerConfig, source: Source | None) -> InputSpec:
    """Return size and normalisation of the images: of the reference, the server's description, or ``--img-size``.

    Raises:
        UsageError: none of them tells.
    """
    if source is not None:
        return source.card.input
    last = shape[3] in (1, 3) and shape[1] not in (1, 3)
    chans, height, width = (shape[3], *shape[1:3]) if last else shape[1:]
    given = config.img_size
    if given is not None:
        height, width = (given, given) if isinstance(given, int) else given
    if min(chans, height, width) < 1:
        raise UsageError(f"the server takes images of any size {list(shape)}; give --img-size, or --reference PACK")
    return InputSpec(height, width, chans, mean=(0.5,) * chans, std=(0.25,) * chans)


def check_size(shape: tuple[int, ...], name: str, source: Source) -> None:
    """Refuse a reference for images of other sizes than the served model's.

    Raises:
        UsageError: says both.
    """
    wanted = (source.card.input.in_chans, *source.card.input.size)
    if any(side > 0 and side != own for side, own in zip(shape[1:], wanted, strict=True)):
        server, own = ("×".join("any" if side < 0 else str(side) for side in sides) for sides in (shape[1:], wanted))
        raise UsageError(f"`{name}` takes images of {server}, --reference {source.name} of {own}; give the served pack")


def to_pixels(images: Tensor, *, channels_last: bool) -> Tensor:
    """Map normalised images to bytes, (n, H, W, C) where the server has channels last."""
    low, high = images.amin(), images.amax()
    pixels = (255 * (images - low) / (high - low).clamp_min(1e-6)).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous() if channels_last else pixels
