"""Inputs of a profile: normalised images, bytes of decoded images, or images with a task number each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vtk.card import InputSpec
from vtk.runtime.source import Source
from vtk_export.gate.images import gate_images

RAW_SCALE = (2.0, 2.0 * 4 / 3)
"""Height and width of the images for a file that resizes by itself, in shares of the model's: a small photograph."""


@dataclass(frozen=True)
class Inputs:
    """Distinct rows of every input, on the CPU.

    Attributes:
        images: (n, C, H, W) fp32, normalised; of a file with preprocessing (n, height, width, 3), RGB,
            uint8 or of the type of the card's value range.
        what: they are, in words.
        name: of the input that takes them.
        more: other inputs (n, …), for instance ``task``, int32.
    """

    images: Tensor
    what: str
    name: str = "pixel_values"
    more: Mapping[str, Tensor] = field(default_factory=dict)

    def normalised(self, spec: InputSpec) -> Tensor:
        """Return the images (n, C, H, W) as the model takes them; bytes are prepared by Pillow, as in evaluations."""
        if self.name == "pixel_values":
            return self.images
        from vtk.data.decoding.memory_images import take_image
        from vtk.data.decoding.rules import Decoding
        from vtk.data.loading.eval_pipeline import eval_transform

        transform, decoding = eval_transform(spec), Decoding.of(spec)
        return torch.stack([transform(take_image(image.numpy(), 3, decoding)) for image in self.images])


def make_inputs(source: Source, count: int, *, seed: int, tasks: int = 0) -> Inputs:
    """Draw ``count`` different rows for what ``source`` takes.

    Args:
        source: whose input it is.
        count: rows.
        seed: of the random images.
        tasks: of a file of many tasks; they take turns.
    """
    from vtk.data.decoding.raw_images import spread
    from vtk.data.random_images import smooth_bytes

    spec = source.card.input
    if not source.facts.preprocessing:
        images, what = gate_images(spec, count, chosen=None, seed=seed)
        if not tasks:
            return Inputs(images, what)
        turns = torch.arange(count, dtype=torch.int32) % tasks
        return Inputs(images, f"{what}, {tasks} tasks in turn", more={"task": turns})
    height, width = (max(round(scale * side), 1) for scale, side in zip(RAW_SCALE, spec.size, strict=True))
    rng = np.random.default_rng(seed)
    drawn = [smooth_bytes(rng, height, width) for _ in range(count)]
    pixels = [spread(image, spec.value_range, spec.value_type) for image in drawn]
    kind = spec.value_type or "uint8"
    what = f"{count} smoothed random images of {height}×{width} pixels, {kind} (seed {seed}), prepared in the graph"
    return Inputs(torch.from_numpy(np.stack(pixels)), what, name="images")
