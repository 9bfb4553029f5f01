"""Batches of the image files that can be read, loaded ahead of the model; the others are listed with the reason."""

import functools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vtk.card import Card
from vtk.data.cpus import batches_ahead, usable_cpus
from vtk.data.decoding.decode import outside_of, pixel_limit, read_image
from vtk.data.decoding.images import reason
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.eval_pipeline import EvalTransform, eval_transform
from vtk.data.loading.loader import quiet_worker
from vtk.errors import DataError

_FEW = 200
"""Images below which starting processes takes longer than decoding in threads."""
_MOST = 8


class Readable(NamedTuple):
    """An image file for a model.

    Attributes:
        path: of the file.
        image: (C, H, W) fp32, or why the file cannot be read.
        outside: whether values are outside of the model's value range and are clipped.
    """

    path: Path
    image: Tensor | str
    outside: bool


class Batch(NamedTuple):
    """Files that were loaded together.

    Attributes:
        paths: of those that could be read.
        images: (B, C, H, W) fp32; None where none could be.
        skipped: the others, and why.
        outside: those of ``paths`` with values outside of the model's value range.
    """

    paths: list[Path]
    images: Tensor | None
    skipped: list[tuple[Path, str]]
    outside: list[Path]

    def __len__(self) -> int:
        return len(self.paths) + len(self.skipped)


def read_or_reason(path: Path, transform: EvalTransform, max_pixels: int) -> Readable:
    """Decode an image and prepare it for the model of ``transform``, or say why it cannot be read."""
    spec = transform.spec
    try:
        image = read_image(path, spec.in_chans, max_pixels, Decoding.of(spec))
        return Readable(path, transform(image), outside_of(image))
    except DataError as error:
        return Readable(path, reason(error.__cause__ or error, path), False)


def batches(paths: Sequence[Path], card: Card, size: int, workers: int | None = None) -> Iterator[Batch]:
    """Yield batches of files in order, while the next ones are loaded.

    Args:
        paths: the files.
        card: of the model; says how images are decoded and prepared.
        size: files of a batch.
        workers: processes; 0 for threads of this process, None for one per CPU (at most 8) or, for a few images,
            threads.
    """
    load = functools.partial(read_or_reason, transform=eval_transform(card.input), max_pixels=pixel_limit(card))
    if workers is None:
        workers = 0 if len(paths) <= _FEW else min(usable_cpus(), _MOST)
    if workers:
        yield from DataLoader(
            _Files(paths, load), batch_size=size, num_workers=workers, collate_fn=_collate,
            worker_init_fn=quiet_worker, pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else each pass would advance the caller's
        )  # fmt: skip
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is the model's own
        for loaded in batches_ahead(paths, load, size):
            yield _collate(loaded)


class _Files(Dataset[Readable]):
    def __init__(self, paths: Sequence[Path], load: "functools.partial[Readable]") -> None:
        self.paths, self.load = paths, load

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Readable:
        return self.load(self.paths[index])


def _collate(loaded: Sequence[Readable]) -> Batch:
    good = [one for one in loaded if isinstance(one.image, Tensor)]
    return Batch(
        [one.path for one in good],
        torch.stack([one.image for one in good if isinstance(one.image, Tensor)]) if good else None,
        [(one.path, one.image) for one in loaded if isinstance(one.image, str)],
        [one.path for one in good if one.outside],
    )
