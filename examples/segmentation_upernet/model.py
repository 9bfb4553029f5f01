"""UPerNet on a plain ViT: transformers' heads over a pyramid of the outputs of four blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from vtk.training.objectives.base import Batch


class Pyramid(nn.Module):
    """Four maps of one grid, drawn to 4, 2, 1 and ½ times its side: XCiT's (Ali et al., 2021) for patches of 16 px."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def double() -> nn.ConvTranspose2d:
            return nn.ConvTranspose2d(width, width, 2, stride=2)

        four = nn.Sequential(double(), nn.BatchNorm2d(width), nn.GELU(), double())
        self.levels = nn.ModuleList([four, double(), nn.Identity(), nn.MaxPool2d(2)])

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Map four maps (B, C, H, W) to maps of 4H × 4W, 2H × 2W, H × W and H/2 × W/2."""
        return [level(x) for level, x in zip(self.levels, maps, strict=True)]


class Segmenter(nn.Module):
    """A timm ViT with transformers' UPerNet head, and its auxiliary head in training.

    Args:
        backbone: gives feature maps by ``forward_intermediates``.
        width: its embedding dimension.
        classes: number of classes of a pixel.
        channels: of the heads' layers; the paper takes the width of the ViT, except 512 for ViT-B.
        blocks: four, whose outputs the heads get.
    """

    def __init__(
        self, backbone: nn.Module, *, width: int, classes: int, channels: int, blocks: Sequence[int] = (0, 1, 2, 3)
    ) -> None:
        super().__init__()
        # a grid of 8 cells is halved before it is pooled: more than 4 cells a side would repeat themselves
        config = UperNetConfig(
            hidden_size=channels, num_labels=classes, pool_scales=(1, 2, 4), auxiliary_channels=channels
        )
        self.backbone, self.blocks = backbone, list(blocks)
        self.pyramid = Pyramid(width)
        self.decode_head = UperNetHead(config, [width] * 4)
        self.auxiliary_head = UperNetFCNHead(config, [width] * 4)
        self.auxiliary_weight = config.auxiliary_loss_weight  # 0.4

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (B, classes, H, W) at the images' size; in training those of the auxiliary head, too."""
        backbone: Any = self.backbone
        maps = self.pyramid(backbone.forward_intermediates(images, indices=self.blocks, intermediates_only=True))
        logits = self._to(self.decode_head(maps), images)
        return (logits, self._to(self.auxiliary_head(maps), images)) if self.training else logits

    @staticmethod
    def _to(x: Tensor, images: Tensor) -> Tensor:
        return F.interpolate(x, images.shape[-2:], mode="bilinear", align_corners=False)


class PixelObjective:
    """Cross-entropy over pixels, plus 0.4 times that of the auxiliary head."""

    def start_epoch(self, seed: int) -> None:
        """Nothing is drawn here."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean over pixels."""
        logits, auxiliary = model(batch.images)
        weight: Any = model.auxiliary_weight
        return F.cross_entropy(logits, batch.labels) + weight * F.cross_entropy(auxiliary, batch.labels), {}
