"""Self-attention of AlterNet (Park and Kim 2022, section 4 and appendix E): multi-head attention in windows of a map.

Windows and the table of relative positions, here one for all heads, are from Swin; there is no shift and no mask, so
that height and width must be multiples of the window. As in the reference code, the attention block has no FFN, and no
activation between its last norm and the attention.
"""

import math

import torch
from timm.layers import use_fused_attn
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn
from torch.nn import functional as F

from vtk.errors import UsageError
from vtk.models.initialization.draw import reset, reset_tensor


class WindowAttention(nn.Module):
    """1×1 convolution to a quarter of the width, norm, attention in windows, 1×1 convolution back.

    Args:
        dim: C, channels in and out.
        norm: of the reduced map.
        reduced: channels of the reduced map.
        heads: H.
        head_dim: D; the inner width H·D does not depend on C (64·H in the paper's code).
        window: w, side of a window in positions.

    Attributes:
        relative_position_bias_table: ((2w-1)², 1), added to the scaled scores of every head; rows are
            indexed by key minus query.
        window_size: (w, w), named as in timm.
    """

    relative_position_index: Tensor

    def __init__(self, dim: int, norm: nn.Module, reduced: int, heads: int, head_dim: int, window: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.window_size = heads, head_dim, (window, window)
        self.scale = head_dim**-0.5
        self.fused_attn = use_fused_attn()
        inner = heads * head_dim
        self.reduce = nn.Conv2d(dim, reduced, 1, bias=False)
        self.norm = norm
        self.q = nn.Conv2d(reduced, inner, 1, bias=False)
        self.kv = nn.Conv2d(reduced, 2 * inner, 1, bias=False)
        self.proj = nn.Conv2d(inner, dim, 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty((2 * window - 1) ** 2, 1))
        # follows from the window: not in the state dict, but on the model's device
        self.register_buffer("relative_position_index", _index(window), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights by the table of `vtk.models.initialization`."""
        reset(self.reduce, "alternet.conv")
        for layer in (self.q, self.kv, self.proj):
            reset(layer, "alternet.attention")
        reset_tensor(self.relative_position_bias_table, "alternet.position")

    def bias(self) -> Tensor:
        """Return the bias of the scores, (1, 1, w², w²): query, key."""
        n = self.window_size[0] ** 2
        return self.relative_position_bias_table[self.relative_position_index.flatten()].view(1, 1, n, n)

    def forward(self, x: Tensor) -> Tensor:
        """Map a feature map (B, C, H, W) to one of the same shape.

        Raises:
            UsageError: H or W is not a multiple of the window.
        """
        height, width = x.shape[-2:]
        if fault := window_fault(height, width, self.window_size[0]):
            raise UsageError(f"{fault}; give images of another size, or the model another `window_size`")
        x = self.norm(self.reduce(x))
        q = self._windows(self.q(x))
        k, v = (self._windows(part) for part in self.kv(x).chunk(2, 1))
        if self.fused_attn:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias().to(q.dtype))
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1) + self.bias()
            out = scores.softmax(-1) @ v
        y: Tensor = self.proj(self._join(out, height, width))
        return y

    def _windows(self, x: Tensor) -> Tensor:
        """(B, H·D, height, width) to (B·windows, H, w², D)."""
        w, h = self.window_size[0], self.num_heads
        rows, columns = x.shape[2] // w, x.shape[3] // w
        x = x.reshape(-1, h, self.head_dim, rows, w, columns, w)
        return x.permute(0, 3, 5, 1, 4, 6, 2).reshape(-1, h, w * w, self.head_dim)

    def _join(self, x: Tensor, height: int, width: int) -> Tensor:
        """(B·windows, H, w², D) to (B, H·D, height, width)."""
        w, h = self.window_size[0], self.num_heads
        x = x.reshape(-1, height // w, width // w, h, w, w, self.head_dim)
        return x.permute(0, 3, 6, 1, 4, 2, 5).reshape(-1, h * self.head_dim, height, width)

    def extra_repr(self) -> str:
        """Show heads and window."""
        return f"heads={self.num_heads}, head_dim={self.head_dim}, window={self.window_size[0]}"


class AttentionBlock(nn.Module):
    """x + attention(GELU(norm(x))), which replaces a pre-activation convolution block.

    Args:
        norm1: norm with its activation.
        attn: maps (B, C, H, W) to the same shape.
        drop_path: stochastic depth, or the identity.
    """

    def __init__(self, norm1: nn.Module, attn: WindowAttention, drop_path: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop_path = norm1, attn, drop_path

    def forward(self, x: Tensor) -> Tensor:
        """Map a feature map (B, C, H, W) to one of the same shape."""
        y: Tensor = x + self.drop_path(self.attn(self.norm1(x)))
        return y


def window_fault(height: int, width: int, window: int) -> str | None:
    """Return why windows do not tile a feature map; None if they do."""
    if not (height % window or width % window):
        return None
    return f"windows of {window}×{window} do not tile a feature map of {height}×{width}"


def windows_fault(model: nn.Module, size: tuple[int, int]) -> str | None:
    """Return why a model cannot take images of ``size`` pixels, height first, and sizes near it; None if it can.

    Models without `AttentionBlock` take every size. Each halving of a map rounds up, so that some sizes other than the
    multiples in the text are possible too.
    """
    unit = 1
    faults = []
    for stage, info in zip(model.stages, model.feature_info[1:], strict=True) if isinstance(model, ResNetV2) else ():
        step = info["reduction"]
        for block in stage.blocks:
            if isinstance(block, AttentionBlock):
                window = block.attn.window_size[0]
                unit = math.lcm(unit, step * window)
                faults.append(window_fault(-(-size[0] // step), -(-size[1] // step), window))
    fault = next(filter(None, faults), None)
    if fault is None:
        return None
    near = sorted({(_near(size[0], unit, up), _near(size[1], unit, up)) for up in (False, True)})
    return f"{fault}; use {' or '.join(str(h) if h == w else f'{h} {w}' for h, w in near)}"


def _near(side: int, unit: int, up: bool) -> int:
    low = side // unit * unit
    return low if low and (low == side or not up) else low + unit


def _index(window: int) -> Tensor:
    """Return the row of the table for each query and key of a window, (w², w²)."""
    side = torch.arange(window)
    place = torch.stack(torch.meshgrid(side, side, indexing="ij")).flatten(1)
    d = place[:, None, :] - place[:, :, None] + window - 1  # key minus query, from 0
    return d[0] * (2 * window - 1) + d[1]
