"""Batches of images on the model's device, and a model in eval mode: the common start of all measures."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from vtk.errors import DataError, UsageError

Batches = Iterable[tuple[Tensor, Tensor]]
"""Images (B, C, H, W) and labels, (B,) int64 or (B, classes) weights that sum to 1, as `vtk.data.make_loader` gives."""


def load_batches(model: nn.Module, batches: Batches, max_images: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return the batches on the model's device, in its floating-point type, at most ``max_images`` images of them.

    They stay in memory, 4·C·H·W bytes per image, because iterative methods need the same images each time.

    Raises:
        DataError: there are no images.
        UsageError: ``max_images`` is below 1.
    """
    return list(stream(model, batches, max_images))


def stream(model: nn.Module, batches: Batches, max_images: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what `load_batches` returns, one batch at a time."""
    if max_images is not None and max_images < 1:
        raise UsageError(f"`max_images` is {max_images}; give 1 or more, or leave it out for all images")
    like = next(model.parameters())
    left, seen = max_images, False
    for images, labels in batches:
        if left is not None:
            images, labels = images[:left], labels[:left]
            left -= len(images)
        if len(images):
            seen = True
            yield images.to(like.device, like.dtype), labels.to(like.device)
        if left == 0:
            return
    if not seen:
        raise DataError("there are no images to analyse; check the folder and its split")


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode within the context: no dropout, running statistics in BatchNorm."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
