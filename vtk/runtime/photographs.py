"""Batches of model inputs from image files, decoded on demand."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vtk import console
from vtk.card import InputSpec
from vtk.data.decoding.images import MAX_PIXELS
from vtk.errors import DataError
from vtk.runtime.images import ImageSelection


class Photographs:
    """Images of ``--data`` with their classes, decoded on demand.

    Attributes:
        paths: evenly spaced over the listing, so that all class folders are covered.
        max_pixels: larger images are refused.
        labels: class indices; None if the folder does not have the model's classes.
        what: description for messages.
    """

    def __init__(self, chosen: ImageSelection, count: int, *, max_pixels: int = MAX_PIXELS) -> None:
        own, self.max_pixels, self.what = len(chosen.paths), max_pixels, chosen.what
        taken = [i * own // count for i in range(count)] if own > count else range(own)
        self.paths = [chosen.paths[i] for i in taken]
        self.labels = None if chosen.labels is None else [chosen.labels[i] for i in taken]

    def batches(self, spec: InputSpec, size: int) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield model inputs (≤ size, C, H, W) and the positions of their images; unreadable ones are left out.

        Raises:
            DataError: no image can be read.
        """
        from vtk.data.loading.eval_pipeline import eval_transform, read_input

        transform = eval_transform(spec)
        images: list[Tensor] = []
        places: list[int] = []
        read = 0
        for i, path in enumerate(self.paths):
            try:
                images.append(read_input(path, transform, self.max_pixels))
            except (DataError, OSError) as error:
                console.warn(f"skipped: {error}")
                continue
            places.append(i)
            if len(images) == size:
                yield torch.stack(images), places
                read += len(images)
                images, places = [], []
        if images:
            yield torch.stack(images), places
        elif not read:
            raise DataError(f"`--data`: none of {len(self.paths)} images could be read; give others")
