"""Two heads over the tokens of a plain ViT, their training, and mean intersection over union."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.data.loading.samplers import mix
from vtk.training.objectives.base import Batch


class Linear(nn.Module):
    """A 1 × 1 convolution of the last block's tokens."""

    def __init__(self, width: int, classes: int, levels: int) -> None:
        super().__init__()
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return logits on the grid of patches."""
        return self.classify(maps[-1])


class Uper(nn.Module):
    """UperNet (Xiao et al., 2018) made light: a plain ViT's levels have one grid, so the first is drawn up to twice.

    The last level is pooled to 1, 2 and 4 cells a side and put together with itself (its context, as in PSPNet); then
    each level takes in the one above, all are drawn to the size of the first, and joined.
    """

    def __init__(self, width: int, classes: int, levels: int, dim: int = 24, cells: Sequence[int] = (1, 2, 4)) -> None:
        super().__init__()
        self.cells = tuple(cells)
        self.pooled = nn.ModuleList(_unit(width, dim, 1) for _ in cells)
        self.context = _unit(width + dim * len(self.cells), dim, 3)
        up = nn.Sequential(nn.ConvTranspose2d(width, dim, 2, stride=2, bias=False), nn.GroupNorm(8, dim), nn.ReLU())
        self.lateral = nn.ModuleList([up, *(_unit(width, dim, 1) for _ in range(levels - 2))])
        self.smooth = nn.ModuleList(_unit(dim, dim, 3) for _ in range(levels - 1))
        self.join = _unit(dim * levels, dim, 3)
        self.classify = nn.Conv2d(dim, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return logits on a grid twice as fine as that of patches."""
        *lower, last = maps
        context = [
            _to(layer(F.adaptive_avg_pool2d(last, n)), last) for n, layer in zip(self.cells, self.pooled, strict=True)
        ]
        x = self.context(torch.cat([last, *context], 1))
        found = [x]
        for level, lateral, smooth in reversed(list(zip(lower, self.lateral, self.smooth, strict=True))):
            side = lateral(level)
            x = side + _to(x, side)
            found.append(smooth(x))
        return self.classify(self.join(torch.cat([_to(level, found[-1]) for level in found], 1)))


def _unit(width: int, dim: int, side: int) -> nn.Sequential:
    # GroupNorm and no BatchNorm: nothing to keep that depends on what was in a batch
    return nn.Sequential(nn.Conv2d(width, dim, side, padding=side // 2, bias=False), nn.GroupNorm(8, dim), nn.ReLU())


def _to(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, like.shape[-2:], mode="bilinear", align_corners=False)


class Segmenter(nn.Module):
    """A timm ViT and a head.

    Args:
        backbone: gives feature maps by ``forward_intermediates``.
        head: see above.
        blocks: whose outputs the head gets.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, blocks: Sequence[int]) -> None:
        super().__init__()
        self.backbone, self.head, self.blocks = backbone, head, list(blocks)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes, H, W) at the images' size."""
        backbone: Any = self.backbone
        maps = backbone.forward_intermediates(images, indices=self.blocks, norm=True, intermediates_only=True)
        return _to(self.head(maps), images)


class PixelObjective:
    """Cross-entropy over pixels."""

    def start_epoch(self, seed: int) -> None:
        """Nothing is drawn here."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean over pixels, and the share of pixels that are right."""
        logits = model(batch.images)
        right = (logits.detach().argmax(1) == batch.labels).float().mean()
        return F.cross_entropy(logits.float(), batch.labels), {"pixels": right}


class PairStream:
    """Pictures and masks in a seeded order, half of them mirrored; in memory, since there are few."""

    def __init__(self, images: Tensor, masks: Tensor, batch_size: int, seed: int) -> None:
        self.images, self.masks, self.batch_size, self.seed = images, masks, batch_size, seed
        full, rest = divmod(len(images), batch_size)
        self.sizes = [batch_size] * full + [rest] * bool(rest)

    def epoch(self, index: int) -> Iterator[Batch]:
        """Yield the batches of epoch ``index``."""
        random = np.random.default_rng(mix(self.seed, index))
        order = random.permutation(len(self.images))
        for start in range(0, len(order), self.batch_size):
            chosen = torch.from_numpy(order[start : start + self.batch_size])
            mirror = torch.from_numpy(random.random(len(chosen)) < 0.5)
            images, masks = self.images[chosen], self.masks[chosen]
            images = torch.where(mirror[:, None, None, None], images.flip(3), images)
            yield Batch(images, torch.where(mirror[:, None, None], masks.flip(2), masks))


@torch.no_grad()
def mean_iou(model: nn.Module, images: Tensor, masks: Tensor, classes: int) -> float:
    """Return the mean over classes of intersection ÷ union, counted over the pixels of all images."""
    model.eval()
    table = torch.zeros(classes, classes, dtype=torch.int64)
    for batch, wanted in zip(images.split(50), masks.split(50), strict=True):
        found = model(batch).argmax(1)
        table += torch.bincount((wanted * classes + found).flatten(), minlength=classes**2).view(classes, classes)
    both = table.diagonal().double()
    return float((both / (table.sum(0) + table.sum(1) - both)).mean())
