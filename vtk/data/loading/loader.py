"""The loader of image batches, which depend only on seed and epoch, not on the number of worker processes."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import parent_process
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vtk.data.audit.result import Sample
from vtk.data.decoding.decode import read_image
from vtk.data.decoding.images import MAX_PIXELS, unreadable
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.samplers import MASK, EpochSampler, mix
from vtk.errors import DataError, UsageError

_PATIENCE = 5.0  # seconds between a worker's checks for its main process
Transform = Callable[[Any], Tensor]
"""From an RGB `PIL.Image.Image` or, for other than one or three channels, `Bands` to a tensor."""


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Decoded and transformed images with their labels.

    An index is an int (epoch 0) or an (epoch, int) pair. Unless a transform's attribute ``random`` is False, all three
    random generators are seeded from (seed, epoch, index) for it.

    Args:
        samples: files and labels.
        transform: image to (C, H, W) fp32 tensor; picklable. Its ``spec`` gives the channels and the rules of
            decoding; by default three channels and the rules of version 0.1.
        seed: of the augmentation.
        max_pixels: largest image.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        transform: Transform,
        seed: int = 0,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.samples, self.transform, self.seed, self.max_pixels = list(samples), transform, seed, max_pixels
        self.in_chans = int(getattr(getattr(transform, "spec", None), "in_chans", 3))
        self.decoding = Decoding.of(getattr(transform, "spec", None))
        self.random = bool(getattr(transform, "random", True))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | tuple[int, int]) -> tuple[Tensor, int]:
        """Return (image, label).

        Raises:
            DataError: the file cannot be decoded, for example since it changed after the scan.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int | tuple[int, int]]) -> list[tuple[Tensor, int]]:
        """Return several (image, label), as torch's loader requests batches."""
        with _own_random() if self.random and get_worker_info() is None else nullcontext():
            return [self._item(*index) if isinstance(index, tuple) else self._item(0, index) for index in indices]

    def _item(self, epoch: int, i: int) -> tuple[Tensor, int]:
        path, label = self.samples[i]
        try:
            image = read_image(path, self.in_chans, self.max_pixels, self.decoding)
        except DataError as error:
            raise ImageReadError(str(error)) from error
        if self.random:
            _seed_all(mix(self.seed, epoch, i))
        try:
            return self.transform(image), label
        except DataError as error:
            raise ImageReadError(str(unreadable(path, error.__cause__ or error))) from error


class ImageReadError(DataError):
    """An image could not be read while loading.

    torch re-raises a worker's exception with the worker's traceback as its text; only the last line is kept.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.strip().rpartition("\n")[2].rpartition("ImageReadError: ")[2])


def make_loader(
    samples: Sequence[Sample],
    transform: Transform,
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    workers: int,
    drop_last: bool = False,
    max_pixels: int = MAX_PIXELS,
    sampler: EpochSampler | None = None,
) -> DataLoader:
    """Return a loader of (images (B, C, H, W) fp32, labels (B,) int64).

    The same seed and epoch give the same batches with any number of workers; `set_epoch` chooses the epoch. A
    ``sampler`` replaces ``shuffle``.

    Raises:
        UsageError: ``batch_size`` below 1, ``workers`` below 0, or ``drop_last`` would leave no batch.
        DataError: ``samples`` is empty.
    """
    if batch_size < 1:
        raise UsageError(f"the batch size is {batch_size}; allowed is at least 1")
    if workers < 0:
        raise UsageError(f"the number of workers is {workers}; allowed is at least 0 (this process)")
    if not samples:
        raise DataError("there are no images to load; check the folder and its split")
    if drop_last and len(samples) < batch_size:
        raise UsageError(f"{len(samples)} images do not fill one batch of {batch_size}; give a smaller batch size")
    return DataLoader(
        ImageDataset(samples, transform, seed, max_pixels),
        batch_size=batch_size,
        sampler=sampler or EpochSampler(len(samples), shuffle=shuffle, seed=seed),
        num_workers=workers,
        worker_init_fn=quiet_worker if workers else None,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        drop_last=drop_last,
        # for torch's base seed of each pass, which would otherwise advance the caller's generator
        generator=torch.Generator().manual_seed(seed & MASK),
    )


def set_epoch(loader: Any, epoch: int, first: int = 0) -> None:
    """Choose the epoch (from 0) of the loader's next pass; also for loaders wrapped by Accelerate.

    Args:
        loader: from `make_loader`.
        epoch: from 0.
        first: index in the epoch's order (over all processes) of the first image of the pass; earlier ones are not
            read.

    Raises:
        UsageError: the loader was not made by `make_loader`.
    """
    if hasattr(loader, "iteration"):  # Accelerate counts passes and sets the sampler's epoch
        loader.iteration = epoch
    batches = getattr(loader, "batch_sampler", None)
    while batches is not None:
        sampler = getattr(batches, "sampler", None)
        if isinstance(sampler, EpochSampler):
            sampler.set_epoch(epoch, first)
            return
        batches = getattr(batches, "batch_sampler", None)
    raise UsageError("this loader has no epochs to set; make it with vtk.data.make_loader")


@contextmanager
def _own_random() -> Iterator[None]:
    """Restore the caller's three random generators: augmentation in its process must not advance them."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def _seed_all(seed: int) -> None:
    """Seed the three generators that timm's and torchvision's augmentations draw from."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def quiet_worker(worker: int) -> None:
    """Silence warnings of large images, which the scan has checked, and leave signals to the main process.

    On a signal to the whole process group (Ctrl-C, a scheduler's SIGTERM) the main process may need more batches until
    it has saved; it then ends its workers.
    """
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # macOS does not report the sender of a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def _end_with(parent: Any) -> None:
    """End this worker when its main process sends SIGTERM or has ended; SIGTERM from others is ignored.

    torch watches the worker's parent, which is another process if workers are started by a fork server.
    """
    while parent.is_alive():
        found = signal.sigtimedwait({signal.SIGTERM}, _PATIENCE)
        if found is not None and found.si_pid == parent.pid:
            break
    os._exit(0)
