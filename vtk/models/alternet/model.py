"""AlterNet (Park and Kim 2022): timm's pre-activation ResNet with attention blocks by the build-up rule."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

from timm.layers import BatchNormAct2d, create_conv2d
from timm.models.resnetv2 import PreActBasic, PreActBottleneck, ResNetV2
from torch import nn

from vtk.errors import UsageError
from vtk.models.alternet.transform import HEAD_DIM, HEADS, build_up
from vtk.models.alternet.window_attention import WindowAttention, windows_fault
from vtk.models.initialization.draw import redraw, reset, scheme

Stem = Literal["imagenet", "cifar"]
STEMS = ("imagenet", "cifar")


class AlterNet(ResNetV2):  # type: ignore[misc]
    """timm's `ResNetV2` with BatchNorm and with `AttentionBlock` in place of some blocks.

    Stem (convolution and pooling without norm), blocks, last norm and classifier are timm's, under timm's names.

    Args:
        layers: blocks of each stage.
        basic: blocks of two 3×3 convolutions (18 and 34 layers) in place of bottlenecks.
        msa_blocks: attention blocks of each stage, or of the model.
        window_size: side of a window in positions.
        heads: of attention blocks in each stage.
        head_dim: channels of a head.
        stem: ``imagenet`` is a 7×7 convolution of stride 2 and a pooling of stride 2; ``cifar`` one 3×3 convolution.
        img_size: pixels, one number or height and width: checked against the windows here rather than in the first
            forward pass. The model itself does not depend on it.
        kwargs: arguments of timm's ResNetV2, such as ``channels``, ``drop_path_rate`` and ``in_chans``.

    Raises:
        UsageError: arguments that do not fit each other or the image size.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        basic: bool = False,
        msa_blocks: int | Sequence[int] = 0,
        window_size: int = 7,
        heads: Sequence[int] = HEADS,
        head_dim: int = HEAD_DIM,
        stem: Stem = "imagenet",
        img_size: int | tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        if stem not in STEMS:
            raise UsageError(f"`stem` is {stem!r}; choose {', '.join(STEMS)}")
        if basic:
            kwargs = {"channels": (64, 128, 256, 512), "bottle_ratio": 1.0, **kwargs}
        super().__init__(list(layers), basic=basic, conv_layer=create_conv2d, norm_layer=BatchNormAct2d, **kwargs)
        if stem == "cifar":
            self._small_stem()
        build_up(self, msa_blocks=msa_blocks, window_size=window_size, heads=heads, head_dim=head_dim)
        if img_size is not None:
            size = (img_size, img_size) if isinstance(img_size, int) else img_size
            if fault := windows_fault(self, size):
                raise UsageError(f"`img_size` {size[0]} {size[1]}: {fault}")

    def init_weights(self, zero_init_last: bool = True) -> None:
        """Draw all weights: by timm's rule in version 0.1, by the table of `vtk.models.initialization` today."""
        super().init_weights(zero_init_last=zero_init_last)
        old = scheme() == "0.1"
        for name, module in self.named_modules():
            if isinstance(module, WindowAttention):
                if not old:
                    module.reset_parameters()
            elif isinstance(module, (nn.Conv2d, nn.Linear)) and ".attn." not in name:
                redraw(module, "alternet.classifier" if name.startswith("head.") else "alternet.conv")
        if old:
            return
        for module in self.modules() if zero_init_last else ():
            if isinstance(module, (PreActBasic, PreActBottleneck)):
                module.zero_init_last()

    def _small_stem(self) -> None:
        """Replace the stem by one of stride 1, after which maps are four times as large, and its own two times."""
        old: Any = self.get_submodule("stem.conv")
        conv = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
        reset(conv, "alternet.conv")
        self.stem = nn.Sequential(OrderedDict(conv=conv.to(old.weight.device, old.weight.dtype)))
        for i, info in enumerate(self.feature_info):
            info["reduction"] //= 4 if i else 2
