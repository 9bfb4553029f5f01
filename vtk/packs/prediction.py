"""`Task.predict`: predicts labels of images, preprocessed as the task's card says."""

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vtk.card import Card
from vtk.data.cpus import batches_ahead
from vtk.data.decoding.decode import pixel_limit
from vtk.data.decoding.memory_images import take_image
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.eval_pipeline import eval_transform, read_input
from vtk.data.sources.image_set import list_images
from vtk.errors import UsageError
from vtk.evaluation.abstention import with_threshold
from vtk.evaluation.config import check_risk
from vtk.evaluation.labels import Prediction, check_finite, check_threshold, predictions
from vtk.models.devices import dtype_name, resolve_device, resolve_dtype
from vtk.models.fp32 import FullPrecision

OneImage: TypeAlias = str | os.PathLike[str] | Image.Image | np.ndarray
Images: TypeAlias = OneImage | Sequence[OneImage] | Tensor
"""Images that `Task.predict` takes."""


class ImageTransform:
    """Transform of an image to a model's input, as in evaluations.

    Args:
        card: of the model.
    """

    def __init__(self, card: Card) -> None:
        self.spec = card.input
        self._prepare = eval_transform(card.input)
        self._limit = pixel_limit(card)
        self._decoding = Decoding.of(card.input)

    def __call__(self, image: OneImage) -> Tensor:
        """Return (C, H, W), fp32, normalised.

        Args:
            image: a PIL image of any mode, an array (H, W, C) of uint8 or in the model's value range, or a path.

        Raises:
            UsageError: another type, or another number of channels than the model's.
            DataError: the file cannot be read.
        """
        if isinstance(image, (str, os.PathLike)):
            return read_input(image, self._prepare, self._limit, self._decoding)
        return self._prepare(take_image(image, self.spec.in_chans, self._decoding))


def predict(
    model: nn.Module, card: Card, images: Images, *, top_k: int, threshold: float | str | None, risk: float | None,
    batch_size: int | None,
    device: str | torch.device | None, precision: str | None,
) -> list[Prediction]:  # fmt: skip
    """Label images; `vtk.packs.load.Task.predict` says what the arguments are."""
    check_threshold(card, threshold, card.model.name)
    if risk is not None and not (isinstance(risk, float) and 0 < risk < 1):
        raise UsageError(f"`risk` is {risk!r:.80}; give a number above 0, below 1")
    check_risk(threshold, risk)
    card = with_threshold(card, threshold, risk, card.model.name)
    for name, value in (("top_k", top_k), ("batch_size", batch_size)):
        if value is None and name == "batch_size":
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise UsageError(f"`{name}` is {value!r:.80}; give a whole number, at least 1")
    size = batch_size or card.regime.batch_size
    place = next(model.parameters()).device if device is None else resolve_device(device)
    dtype = resolve_dtype(precision or card.regime.precision)
    found: list[Prediction] = []
    with _running(model, place, dtype) as run:
        for paths, batch in _batches(images, card, size):
            logits = run(batch.to(place, dtype))
            check_finite(logits, f"{card.model.name} in {dtype_name(dtype)}")
            found += predictions(card, logits, paths, top_k=top_k, threshold=threshold)
    return found


def _batches(images: Images, card: Card, size: int) -> Iterator[tuple[list[Path | None], Tensor]]:
    if isinstance(images, Tensor):
        spec = card.input
        if images.ndim != 4 or images.shape[1] != spec.in_chans or not images.is_floating_point():
            raise UsageError(
                f"a tensor is {images.dtype} {tuple(images.shape)}; give normalised images (B, {spec.in_chans}, "
                f"{spec.height}, {spec.width}) of a floating type, as `task.transform` makes them"
            )
        if bad := (~images.flatten(1).isfinite().all(1)).nonzero().flatten().tolist():
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise UsageError(
                f"image {bad[0]} of the tensor's {len(images)}{more} holds NaN or infinite values; leave it out"
            )
        for part in images.split(size):
            yield [None] * len(part), part
        return
    given = list(images) if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    items: list[Any] = []
    for one in given:  # a folder stands for its images
        items += list_images(Path(one)) if isinstance(one, (str, os.PathLike)) and os.path.isdir(one) else [one]
    transform = ImageTransform(card)
    paths = [Path(item) if isinstance(item, (str, os.PathLike)) else None for item in items]
    for number, batch in enumerate(batches_ahead(items, transform, size)):
        yield paths[number * size : number * size + len(batch)], torch.stack(batch)


@contextlib.contextmanager
def _running(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """Give the forward pass in eval mode, in ``dtype`` on ``device``; the model itself stays as it is."""
    held = {(t.device, t.dtype) for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    if held - {(device, dtype)}:
        model = copy.deepcopy(model).to(device=device, dtype=dtype)
    modes = {module: module.training for module in model.modules()}
    full = FullPrecision()
    try:
        with torch.inference_mode():
            yield model.eval()
    finally:
        full.release()
        for module, training in modes.items():
            module.training = training
