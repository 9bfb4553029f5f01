"""What a stem must fit, and the layers that several stems have."""

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
    """The place of a stem.

    Attributes:
        in_chans: channels of the images.
        dim: C, channels of a token.
        patch: height and width of a patch in pixels: the stem's total stride.
        device: of its parameters.
        dtype: of its parameters.
    """

    in_chans: int
    dim: int
    patch: tuple[int, int]
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    @property
    def factory(self) -> dict[str, Any]:
        """Keyword arguments for every layer."""
        return {"device": self.device, "dtype": self.dtype}

    def split_dim(self, stem: str, parts: int) -> int:
        """Return C ÷ ``parts``.

        Raises:
            UsageError: C is no multiple of it.
        """
        if self.dim % parts:
            raise UsageError(
                f"`--stem` {stem} starts from 1/{parts} of the model's channels, and {self.dim} is no multiple of "
                f"{parts}; take another model or one of the conv stems"
            )
        return self.dim // parts

    def batch_norm(self, channels: int) -> nn.Module:
        """Return BatchNorm over channels.

        Not SyncBatchNorm, which deit's code has for its runs on many GPUs and which does nothing on one: both have the
        same tensors and compute the same in eval mode. Where each process has only few images, its statistics are of
        few: ``torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`` makes one of the other.
        """
        return nn.BatchNorm2d(channels, **self.factory)

    def layer_norm(self, channels: int) -> nn.Module:
        """Return LayerNorm over the channels of each position: over more, it would join patches."""
        norm: nn.Module = LayerNorm2d(channels, **self.factory)
        return norm

    def activation(self, name: ActivationName, channels: int) -> nn.Module:
        """Return an activation of a map with so many channels."""
        if name == "scaled-relu":
            return ScaledReLU(channels, **self.factory)
        return _PLAIN_ACTIVATIONS[name]()
