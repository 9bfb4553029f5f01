"""MAE (He et al. 2021): encodes the visible patches only; a small decoder predicts the pixels of the hidden ones."""

import math
from typing import Any

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models import checkpoint_seq
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk.models.initialization.draw import reset, reset_tensor
from vtk.models.transforms.local_attention import LocalAttention
from vtk.training.objectives.base import Objective
from vtk.training.pretrain import reconstruction_plots
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.masked_method import At, MaskedMethod, MaskedModel, PixelObjective
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.patches import normalized, pick, positions_of

_HEAD_DIM = 32
_LOCAL = (
    "`--method` mae drops masked patches, and local attention needs the whole grid of them; give --method simmim or "
    "beit, or weights and options without it"
)


class MaeModel(MaskedModel):
    """A ViT over the visible patches, and a decoder of a few blocks over all of them.

    Args:
        backbone: timm's VisionTransformer.
        outputs: pixels of a patch, times channels.
        at: where patches are hidden.
        dim: width of the decoder, a multiple of 32.
        depth: blocks of the decoder.
    """

    mask_places: Tensor

    def __init__(self, backbone: nn.Module, outputs: int, at: At, dim: int, depth: int) -> None:
        super().__init__(backbone, at)
        self.embed = nn.Linear(int(self.backbone.embed_dim), dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, dim // _HEAD_DIM, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.predict = nn.Linear(dim, outputs)
        places = build_sincos2d_pos_embed(list(self.grid), dim, interleave_sin_cos=False)
        self.register_buffer("mask_places", places[None], persistent=False)
        for layer in self.modules():
            if isinstance(layer, nn.Linear) and not any(layer is own for own in self.backbone.modules()):
                reset(layer, "mae.linear")
        reset_tensor(self.mask_token, "mae.mask_token")

    def encode(self, images: Tensor, mask: Tensor, count: int) -> Tensor:
        """Return the backbone's tokens (B, prefix + N - count, C) of the patches that ``mask`` (B, N) keeps."""
        vit = self.backbone
        tokens = vit._pos_embed(vit.patch_embed(self.seen(images, mask)))
        prefix = tokens.shape[1] - mask.shape[1]
        visible = positions_of(~mask, mask.shape[1] - count)
        tokens = vit.norm_pre(torch.cat([tokens[:, :prefix], pick(tokens[:, prefix:], visible)], dim=1))
        if vit.grad_checkpointing and self.training:
            tokens = checkpoint_seq(vit.blocks, tokens)
        else:
            tokens = vit.blocks(tokens)
        encoded: Tensor = vit.norm(tokens)
        return encoded

    def forward(self, images: Tensor, mask: Tensor, *, count: int) -> Tensor:
        """Return predictions (B, count, outputs) of the ``count`` hidden patches of each image, in ascending order."""
        visible = mask.shape[1] - count
        known = self.embed(self.encode(images, mask, count))
        prefix = known.shape[1] - visible
        every = self.mask_token.expand(len(mask), mask.shape[1], -1).scatter(
            1, positions_of(~mask, visible).unsqueeze(-1).expand(-1, -1, known.shape[-1]), known[:, prefix:]
        )
        tokens = self.blocks(torch.cat([known[:, :prefix], every + self.mask_places.to(every.dtype)], dim=1))
        hidden = pick(tokens[:, prefix:], positions_of(mask, count))
        predicted: Tensor = self.predict(self.norm(hidden))
        return predicted


class Mae(MaskedMethod):
    """Predicts pixels, normalised patch by patch, from the visible patches."""

    def check(self, backbone: nn.Module, config: PretrainConfig, spec: InputSpec) -> None:
        """Refuse all but plain Vision Transformers: others need the positions of their tokens.

        Raises:
            UsageError: the backbone is not supported.
        """
        own = getattr(type(backbone), "forward_features", None)
        if not isinstance(backbone, VisionTransformer) or own is not VisionTransformer.forward_features:
            raise UsageError(
                f"`--method` mae drops masked patches, which {type(backbone).__name__} does not support; give a plain "
                "ViT (vit_*, deit_*), or --method simmim"
            )
        if config.local_attention:
            raise UsageError(_LOCAL)
        super().check(backbone, config, spec)

    def model(self, backbone: nn.Module, setting: Setting) -> nn.Module:
        """Return the backbone with a decoder.

        Raises:
            UsageError: the weights' file has brought local attention.
        """
        if any(isinstance(module, LocalAttention) for module in backbone.modules()):
            raise UsageError(_LOCAL)
        config, spec, (rows, columns) = setting.config, setting.spec, self.masks.grid
        outputs = spec.in_chans * spec.height * spec.width // (rows * columns)
        width: Any = backbone.embed_dim
        dim = config.decoder_dim or _HEAD_DIM * math.ceil(width / 2 / _HEAD_DIM)
        return self.ready(MaeModel(backbone, outputs, config.mask_at, dim, config.decoder_depth), setting)

    def objective(self, setting: Setting) -> Objective:
        """Return the mean squared error of hidden pixels."""
        return PixelObjective(self.masks, "l2", *([normalized] if setting.config.norm_pixels else []))

    def draw(self, model: nn.Module, images: Tensor, setting: Setting) -> None:
        """Draw originals, masked images and reconstructions."""
        reconstruction_plots.reconstruction(model, images, self.masks, setting)

    def numbers(self) -> dict[str, Any]:
        """Return the number of masked patches."""
        return {"masked": self.masks.count, "patches": self.masks.grid[0] * self.masks.grid[1]}
