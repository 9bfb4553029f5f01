"""Loads images and labels of NumPy files, such as CIFAR-C's, through the preprocessing of files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vtk.data.audit.result import Sample
from vtk.data.decoding.memory_images import take_image
from vtk.data.loading.eval_pipeline import EvalTransform
from vtk.data.loading.loader import ImageDataset, quiet_worker
from vtk.errors import DataError
from vtk.readers import check_plain, reading

_MOST_SIDE = 4096


def read_labels(path: Path) -> np.ndarray:
    """Return the labels of a ``.npy`` file, (N,) int64.

    Raises:
        DataError: it is no such file, or its values are not class numbers.
    """
    labels = _open(path, "an array of labels")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise DataError(f"{path} is no row of class numbers, as CIFAR-C's labels.npy is")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > np.iinfo(np.int64).max:
        raise DataError(f"{path} has the label {low if low < 0 else high}; class numbers are 0, 1, 2, …")
    return labels.astype(np.int64)


def open_images(path: Path) -> np.ndarray:
    """Return the images of a ``.npy`` file, (N, H, W, 3) uint8, mapped from the file.

    Raises:
        DataError: it is no such file, or its array is of another kind.
    """
    images = _open(path, "an array of images")
    shape = images.shape
    fits = images.dtype == np.uint8 and len(shape) == 4 and shape[3] == 3
    if not fits or not all(0 < side <= _MOST_SIDE for side in shape[1:3]) or not shape[0]:
        raise DataError(f"{path} is {images.dtype} {shape}; images are uint8 (number, height, width, 3)")
    return images


def _open(path: Path, what: str) -> np.ndarray:
    """Return the array of a ``.npy`` file, mapped from it; objects, which would have to be unpickled, are refused."""
    check_plain(path, what)
    with reading(path, "is not a whole .npy file"):
        return np.lib.format.open_memmap(path, mode="r")


class ArrayImages(ImageDataset):
    """Images of a ``.npy`` file, from row ``first`` on.

    Args:
        path: of the array.
        first: row of the first image.
        labels: of the images.
        transform: of evaluation.
    """

    def __init__(self, path: Path, first: int, labels: Sequence[int], transform: EvalTransform) -> None:
        super().__init__([Sample(path, int(label)) for label in labels], transform)
        self.path, self.first = path, first
        self._images: np.ndarray | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave the mapped file to each worker."""
        return {**self.__dict__, "_images": None}

    def _item(self, epoch: int, i: int) -> tuple[Tensor, int]:
        if self._images is None:
            self._images = open_images(self.path)
        image = take_image(np.array(self._images[self.first + i]), self.in_chans, self.decoding)
        return self.transform(image), self.samples[i].label


def make_array_loader(dataset: ArrayImages, *, batch_size: int, workers: int) -> "DataLoader[tuple[Tensor, int]]":
    """Return a loader of (images (B, C, H, W) fp32, labels (B,) int64), in the order of the array."""
    return DataLoader(
        dataset, batch_size=batch_size, num_workers=workers, worker_init_fn=quiet_worker if workers else None,
        pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
