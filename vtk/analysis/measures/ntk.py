"""Condition number of the neural tangent kernel (Chen et al. 2022, §3 and Appendix G)."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from vtk import console
from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.share import ALONE, Share
from vtk.errors import NoResultError, UsageError

Outputs = Literal["sum", "all"]
OUTPUTS: tuple[Outputs, ...] = ("sum", "all")
PAPER_BLOCK = 48


@dataclass(frozen=True)
class NtkCondition(MeasureResult):
    """Condition numbers of the diagonal blocks of the kernel.

    Attributes:
        condition: κ, the mean over blocks; infinite if one of them is singular.
        conditions: κ of each block, λ₁ / λₘ.
        eigenvalues: of each block, largest first.
        block_images: images of a block; κ grows with it, so that only numbers of the same size can be compared.
        images: of all blocks.
        outputs: ``sum`` or ``all``.
        rectified: whether ReLU took the place of GELU.
    """

    condition: float
    conditions: tuple[float, ...]
    eigenvalues: tuple[tuple[float, ...], ...]
    block_images: int
    images: int
    outputs: Outputs
    rectified: bool


def ntk_condition(
    model: nn.Module,
    batches: Batches,
    *,
    block: int = PAPER_BLOCK,
    outputs: Outputs = "sum",
    rectified: bool = False,
    max_images: int | None = None,
    share: Share = ALONE,
    show_progress: bool = False,
) -> NtkCondition:
    """Return κ = λ₁ / λₘ of the neural tangent kernel Θ = J·Jᵀ, averaged over its diagonal blocks, in eval mode.

    J has the derivatives of the outputs by all parameters. Chen et al. (2022) cannot compute all of Θ either and
    averages over blocks of 48 × 48, at initialisation, with ReLU in place of GELU: give a model with fresh weights, and
    ``rectified``. It does not say what is the one number of an image that such a block is made of; here it is the sum
    of the logits, as in the code of the work on trainability that it cites (Chen et al., TE-NAS, ICLR 2021). ``all``
    takes every logit, as Θ is defined, in blocks of images × classes rows.

    Memory: gradients by one parameter tensor of all rows of a block at a time, 4 · rows · numbers of the largest tensor
    bytes, and the activations of a backward pass over as many images.

    Args:
        model: unchanged on return.
        batches: images, labels unused.
        block: images of a block, 2 or more. Images that do not fill a block are left out; if there are fewer than one
            block, all of them are one.
        outputs: ``sum`` or ``all``.
        rectified: measure with ReLU in place of every GELU module.
        max_images: use only the first ones.
        share: blocks are divided between processes.
        show_progress: show a progress bar.

    Raises:
        UsageError: an argument is out of range, or the model does something that cannot be differentiated image by
            image.
        NoResultError: there are fewer than two images, or derivatives of the outputs are not finite.
    """
    if block < 2:
        raise UsageError(f"`block` is {block}; a condition number needs 2 images or more")
    if outputs not in OUTPUTS:
        raise UsageError(f"outputs {outputs!r} are not known; give {' or '.join(OUTPUTS)}")
    images = torch.cat([images for images, _ in stream(model, batches, max_images)])
    if len(images) < 2:
        raise NoResultError("a condition number needs two images or more")
    block = min(block, len(images))
    blocks = images[: len(images) // block * block].split(block)
    width = block * (_classes(model, images) if outputs == "all" else 1)

    def spectrum(index: int) -> list[float]:
        kernel = tangent_kernel(model, blocks[index], outputs=outputs)
        if not bool(kernel.isfinite().all()):
            raise NoResultError(
                "the derivatives of the model's outputs are not finite on these images; look at its weights"
            )
        values: list[float] = torch.linalg.eigvalsh(kernel).flip(0).tolist()
        return values

    with (
        eval_mode(model),
        _relu(model) if rectified else contextlib.nullcontext(),
        console.progress("tangent kernel", len(blocks) * block, enabled=show_progress) as bar,
    ):
        spectra = share.rows(
            len(blocks), width, images.device, spectrum, done=lambda first, after: bar.advance(block * (after - first))
        )
    conditions = tuple(_condition(values, images.dtype) for values in spectra)
    return NtkCondition(
        sum(conditions) / len(conditions),
        conditions,
        tuple(tuple(values) for values in spectra),
        block,
        block * len(blocks),
        outputs,
        rectified,
    )


def tangent_kernel(model: nn.Module, images: Tensor, *, outputs: Outputs = "sum") -> Tensor:
    """Return J·Jᵀ (rows, rows) in fp64, rows being images, or with ``all`` images × classes, image by image.

    Every row has a copy of each parameter that is a view of it, so that the backward gives gradients row by row. As
    soon as those of a parameter are there, their products are added to the kernel and they are dropped.

    Args:
        model: in eval mode, with outputs (B, classes).
        images: (B, C, H, W), on the model's device.
        outputs: of each image: the sum of its logits, or all of them.

    Raises:
        UsageError: the model does something that cannot be differentiated image by image.
    """
    classes = _classes(model, images) if outputs == "all" else 1
    images = images.repeat_interleave(classes, dim=0)
    count = len(images)
    kernel = torch.zeros(count, count, dtype=torch.float64, device=images.device)

    def add(copy: Tensor) -> None:
        assert copy.grad is not None
        for piece in copy.grad.reshape(count, -1).split(2**16, dim=1):
            wide = piece.double()  # in fp32 the smallest eigenvalues would be rounding errors
            kernel.addmm_(wide, wide.T)
        copy.grad = None

    copies = {n: p.detach().expand(count, *p.shape).requires_grad_() for n, p in model.named_parameters()}
    handles = [copy.register_post_accumulate_grad_hook(add) for copy in copies.values()]

    def logits(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        batch: Tensor = functional_call(model, parameters, (image[None],))
        return batch[0]

    try:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            outputs_of = _mapped(logits, copies, images)
            if outputs == "all":
                outputs_of = outputs_of.unflatten(0, (-1, classes)).diagonal(dim1=1, dim2=2)
            torch.autograd.backward(outputs_of.sum(), inputs=list(copies.values()))
    finally:
        for handle in handles:
            handle.remove()
    return kernel


def _mapped(function: Any, copies: dict[str, Tensor], images: Tensor) -> Tensor:
    try:
        result: Tensor = torch.vmap(function)(copies, images)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise UsageError(f"the model cannot be differentiated image by image: {str(error).splitlines()[0]}") from error
    return result


@torch.no_grad()
def _classes(model: nn.Module, images: Tensor) -> int:
    return int(model(images[:1]).shape[-1])


def _condition(values: list[float], dtype: torch.dtype) -> float:
    """Return λ₁ / λₘ; infinite where λₘ is below what gradients of this type can tell from 0.

    An error ε in the gradients, relative to the largest singular value of J, moves the smallest by as much, and λ is
    its square.
    """
    floor = (len(values) * torch.finfo(dtype).eps) ** 2 * values[0]
    return values[0] / values[-1] if values[-1] > max(floor, 0.0) else math.inf


@contextlib.contextmanager
def _relu(model: nn.Module) -> Iterator[None]:
    """Let ReLU take the place of GELU within the context."""
    activations = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "GELU" in type(child).__name__
    ]
    try:
        for parent, name, _ in activations:
            setattr(parent, name, nn.ReLU())
        yield
    finally:
        for parent, name, child in activations:
            setattr(parent, name, child)
