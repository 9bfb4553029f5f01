"""Images to verify an exported file with: real ones where given, else smoothed random ones."""

import torch
from torch import Tensor
from torch.nn import functional

from vtk import console
from vtk.card import InputSpec
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.loading.normalization import to_input
from vtk.errors import DataError
from vtk.runtime.images import ImageSelection

# plain noise excites a ViT unlike any photograph: its patches all look alike. Noise drawn at this many cells per side
# and interpolated has the smooth areas and few edges of an image.
_CELLS = 8


def gate_images(
    spec: InputSpec, count: int, *, chosen: ImageSelection | None, seed: int, max_pixels: int = MAX_PIXELS
) -> tuple[Tensor, str]:  # fmt: skip
    """Return ``count`` different model inputs and one line that says what they are.

    Args:
        spec: size and normalisation.
        count: number of images.
        chosen: images, taken at even distances over the listing; missing ones are filled up.
        seed: of the random images.
        max_pixels: a larger image cannot be read (`vtk.data.decoding.decode.pixel_limit` of the model's card).

    Returns:
        fp32 (count, in_chans, height, width), normalised.

    Raises:
        DataError: no image of ``chosen`` can be read.
    """
    real = _real_images(spec, count, chosen, max_pixels) if chosen is not None else []
    missing = count - len(real)
    of_data = f"{len(real)} {chosen.what if chosen else ''}"
    if not missing:
        return torch.stack(real), of_data
    images = torch.cat([*(image[None] for image in real), _smooth_images(spec, missing, seed)])
    text = f"{missing} smoothed random images (seed {seed})"
    return images, f"{of_data} and {text}" if real else text


def _smooth_images(spec: InputSpec, count: int, seed: int) -> Tensor:
    """Draw coarse noise, interpolate it to size, stretch it over [0, 1] and normalise: (count, C, H, W) fp32."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((count, spec.in_chans, _CELLS, _CELLS), generator=generator)
    pixels = functional.interpolate(coarse, size=spec.size, mode="bicubic", align_corners=False)
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    pixels = (pixels - low) / (high - low).clamp_min(1e-6)
    return to_input(pixels, spec)


def _real_images(spec: InputSpec, count: int, chosen: ImageSelection, max_pixels: int) -> list[Tensor]:
    from vtk.data.loading.eval_transform import eval_transform, read_input

    paths = chosen.paths
    # an even distance walks through all class folders
    ordered = [paths[i * len(paths) // count] for i in range(count)] if len(paths) > count else paths
    transform = eval_transform(spec)
    images = []
    for path in ordered:
        try:
            images.append(read_input(path, transform, max_pixels))
        except (DataError, OSError) as error:
            console.warn(f"skipped: {error}")
    if not images:
        raise DataError(f"`--data`: none of {len(ordered)} {chosen.what} could be read; give others, or leave it out")
    return images
