"""Measures the drift of a parallelized model from the sequential one: in the logits, and block by block."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BATCH = 16


@dataclass(frozen=True)
class BlockDrift:
    """Drift of one parallel block from the sequential blocks it replaces, on the same inputs.

    Attributes:
        blocks: number of the first and of the last sequential block.
        output: ‖parallel − sequential‖ / ‖sequential‖ of the outputs, over all images, tokens and channels.
        update: the same divided by ‖sequential output − input‖, the update of the blocks.
    """

    blocks: tuple[int, int]
    output: float
    update: float


@dataclass(frozen=True)
class Drift:
    """Drift of a whole model.

    Attributes:
        count: images.
        cosine_mean: of the cosines between the two models' logits, one per image.
        cosine_min: the smallest.
        agreement: share of images with the same most likely class.
        blocks: per parallel block.
    """

    count: int
    cosine_mean: float
    cosine_min: float
    agreement: float
    blocks: tuple[BlockDrift, ...]


@torch.inference_mode()
def measure_drift(sequential: nn.Module, parallel: nn.Module, branches: int, images: Tensor) -> Drift:
    """Compare a ViT with the same one after ``parallelize``.

    Args:
        sequential: timm VisionTransformer, in eval mode.
        parallel: the same with every ``branches`` blocks joined, on the same device.
        branches: P.
        images: model inputs (n, C, H, W), on any device.
    """
    device = next(sequential.parameters()).device
    joined: Any = parallel.blocks
    sums = torch.zeros(len(joined), 3, dtype=torch.float64)  # squared norms: difference, output, update
    cosines, same = [], 0
    for batch in images.split(_BATCH):
        states, logits = _run(sequential, batch.to(device))
        ends = states[::branches]
        for i, (x, y) in enumerate(itertools.pairwise(ends)):
            z = joined[i](x)
            sums[i] += torch.stack([_square(z - y), _square(y), _square(y - x)]).cpu()
        other = parallel(batch.to(device))
        cosines.append(F.cosine_similarity(logits.double(), other.double(), dim=-1).cpu())
        same += int((logits.argmax(-1) == other.argmax(-1)).sum())
    rows = []
    for i, (off, output, update) in enumerate(sums.sqrt().tolist()):
        place = (i * branches, (i + 1) * branches - 1)
        rows.append(BlockDrift(place, _ratio(off, output), _ratio(off, update)))
    cosine = torch.cat(cosines)
    return Drift(len(images), float(cosine.mean()), float(cosine.min()), same / len(images), tuple(rows))


def _run(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the input of the first block followed by the output of every block, and the logits."""
    blocks: Any = model.blocks
    states: list[Tensor] = []
    handles = [blocks[0].register_forward_pre_hook(lambda module, args: states.append(args[0]))]
    handles += [block.register_forward_hook(lambda module, args, output: states.append(output)) for block in blocks]
    try:
        logits: Tensor = model(images)
    finally:
        for handle in handles:
            handle.remove()
    return states, logits


def _square(x: Tensor) -> Tensor:
    return x.double().square().sum()


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")
