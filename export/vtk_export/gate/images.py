"""Loads the images that a file is verified with, or generates smoothed random ones."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vtk import console
from vtk.card import Card, InputSpec
from vtk.data.decoding.decode import pixel_limit
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.loading.normalization import to_input
from vtk.data.random_images import smooth_pixels
from vtk.errors import DataError
from vtk.runtime.data_option import DataImages, data_images, judging_images
from vtk.runtime.data_parts import Split
from vtk.runtime.export_facts import Facts
from vtk.runtime.images import ImageSelection
from vtk.runtime.source import Source
from vtk_export.gate.limits import BATCHES


@dataclass(frozen=True)
class GateInputs:
    """Card and images that the file of one model is verified with.

    Attributes:
        card: of the model, as it goes into the file.
        images: (``sum(batches)``, in_chans, height, width) fp32, normalised, all different.
        what: what they are, in words.
        batches: sizes to run.
        given: images of ``--data``, None without.
    """

    card: Card
    images: Tensor
    what: str
    batches: tuple[int, ...]
    given: DataImages | None


def gate_inputs(
    source: Source, *, data: Path | None, split: Split | None, seed: int, static_batch: int | None = None
) -> GateInputs:  # fmt: skip
    """Return the images for a source's file, enough for `BATCHES` or for its fixed batch size.

    Raises:
        DataError: no image of ``data`` can be read.
    """
    card = dataclasses.replace(source.card, base=None, pack={})
    batches = BATCHES if static_batch is None else (static_batch,)
    given = data_images(source.card, data, split, described=source.described)
    images, what = card_images(card, sum(batches), given, seed=seed)
    return GateInputs(card, images, what, batches, given)


def card_images(card: Card, count: int, given: DataImages | None, *, seed: int) -> tuple[Tensor, str]:
    """Return `gate_images` for a model, from the judging images of ``--data`` if there are any."""
    return gate_images(card.input, count, chosen=judging_images(given), seed=seed, max_pixels=pixel_limit(card))


def judged_images(given: DataImages, facts: Facts, max_drop: float | None) -> ImageSelection:
    """Return the images that judge a file: none that it was calibrated on, or that chose what stays in float."""
    if not facts.calibrated:
        return given.judging
    return given.calibration[1] if max_drop is None else given.choice[1]


def gate_images(
    spec: InputSpec, count: int, *, chosen: ImageSelection | None, seed: int, max_pixels: int = MAX_PIXELS
) -> tuple[Tensor, str]:  # fmt: skip
    """Return ``count`` different model inputs and a description of them.

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
    """Draw smooth images and normalise them: (count, C, H, W) fp32."""
    return to_input(smooth_pixels(count, spec.in_chans, spec.size, seed=seed), spec)


def _real_images(spec: InputSpec, count: int, chosen: ImageSelection, max_pixels: int) -> list[Tensor]:
    from vtk.data.loading.eval_pipeline import eval_transform, read_input

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
