"""Rotary position embedding of queries or keys, and its gradients (Su et al., 2021).

    y = x ⊙ cos + R(x) ⊙ sin,    R: (a, b) → (−b, a) for each pair of channels

The table is timm's: sines, then cosines, each with both entries of a pair. A pair is channels (i, i + D/2), or
(2i, 2i + 1). Tokens before the last N' (class and register tokens) are not rotated. In 16 bits a rotation is computed
in the table's type and rounded once.
"""

import torch
from torch import Tensor


def rotate(x: Tensor, rope: Tensor, half: bool, *, back: bool = False) -> Tensor:
    """Rotate heads.

    Args:
        x: (B, N, H, D), of any strides.
        rope: (N', 2 D), (H, N', 2 D) or (B, 1 or H, N', 2 D).
        half: whether pairs are (i, i + D/2).
        back: the transposed product, which takes a gradient of the result to that of ``x``.

    Returns:
        (B, N, H, D), contiguous, the type of ``x``.
    """
    sin, cos = (_by_token(part) for part in rope.chunk(2, -1))
    first = x.shape[1] - cos.shape[-3]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[:, :first] = x[:, :first]
    (a, b), (to_a, to_b) = _pairs(x[:, first:], half), _pairs(y[:, first:], half)
    (sin_a, sin_b), (cos_a, cos_b) = _pairs(sin, half), _pairs(cos, half)
    if back:
        sin_a, sin_b = -sin_b, -sin_a
    if x.dtype == cos.dtype:
        torch.mul(a, cos_a, out=to_a).addcmul_(b, sin_a, value=-1)
        torch.mul(b, cos_b, out=to_b).addcmul_(a, sin_b)
    else:
        to_a.copy_(a * cos_a - b * sin_a)
        to_b.copy_(b * cos_b + a * sin_b)
    return y


def rope_gradient(g: Tensor, x: Tensor, rope: Tensor, half: bool) -> Tensor:
    """Return the gradient of the table, of its shape and type.

    Args:
        g: (B, N, H, D), gradient of the rotated heads.
        x: (B, N, H, D), before rotation.
        rope: as of `rotate`.
        half: likewise.
    """
    size = rope.shape[-2]
    wide = torch.promote_types(rope.dtype, torch.float32)
    g, x = (t[:, t.shape[1] - size :].to(wide) for t in (g, x))
    (g_a, g_b), (a, b) = _pairs(g, half), _pairs(x, half)
    sin = torch.empty_like(x)
    for into, product in zip(_pairs(sin, half), (-g_a * b, g_b * a), strict=True):
        into.copy_(product)
    parts = [_from_tokens(part, rope) for part in (sin, g * x)]
    return torch.cat(parts, -1).to(rope.dtype)


def _pairs(x: Tensor, half: bool) -> tuple[Tensor, ...]:
    """Return views of the first and of the second channel of each pair."""
    return x.chunk(2, -1) if half else (x[..., 0::2], x[..., 1::2])


def _by_token(table: Tensor) -> Tensor:
    """Return a table as it is multiplied with (B, N', H, D)."""
    return table.unsqueeze(1) if table.ndim == 2 else table.transpose(-3, -2)


def _from_tokens(product: Tensor, rope: Tensor) -> Tensor:
    """Sum (B, N', H, D) to the shape of half a table."""
    product = product.transpose(1, 2)
    return product.sum_to_size(*rope.shape[:-1], rope.shape[-1] // 2)
