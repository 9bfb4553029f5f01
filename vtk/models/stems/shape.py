"""Channels and patch of a stem, and layers that several stems share."""

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import LayerNorm2d
from torch import nn

from vtk.errors import UsageError
from vtk.models.stems.names import ActivationName
from vtk.models.stems.scaled_relu import ScaledReLU

_PLAIN_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "hardswish": nn.Hardswish}


@dataclass(frozen=True)
class StemShape:
    """Channels, patch and tensor type of a stem.

    Attributes:
        in_chans: channels of the images.
        dim: C, channels of a token.
        patch: height and width of a patch in pixels: the stem's total stride.
        device: of its parameters.
        dtype: of its parameters.
        hidden: channels between the convolutions of a conv stem: 64, as in VOLO up to d4.
    """

    in_chans: int
    dim: int
    patch: tuple[int, int]
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    hidden: int = 64

    @property
    def factory(self) -> dict[str, Any]:
        """Keyword arguments for every layer."""
        return {"device": self.device, "dtype": self.dtype}

    def split_dim(self, stem: str, parts: int) -> int:
        """Return C ÷ ``parts``.

        Raises:
            UsageError: C is not a multiple of ``parts``.
        """
        if self.dim % parts:
            raise UsageError(
                f"`--stem` {stem} needs channels divisible by {parts}, and the model has {self.dim}; "
                f"use another model or a conv stem"
            )
        return self.dim // parts

    def batch_norm(self, channels: int) -> nn.Module:
        """Return BatchNorm over channels.

        deit's code has SyncBatchNorm for runs on many GPUs: the same tensors, and equal to BatchNorm in eval mode. With
        few images per process, convert with ``torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)``.
        """
        return nn.BatchNorm2d(channels, **self.factory)

    def layer_norm(self, channels: int) -> nn.Module:
        """Return LayerNorm over the channels of each position, which keeps patches independent."""
        norm: nn.Module = LayerNorm2d(channels, **self.factory)
        return norm

    def activation(self, name: ActivationName, channels: int, *, last: bool = False) -> nn.Module:
        """Return an activation for a map of ``channels``, or for tokens, whose channels are the ``last`` axis."""
        if name == "scaled-relu":
            return ScaledReLU(channels, **self.factory, last=last)
        return _PLAIN_ACTIVATIONS[name]()
