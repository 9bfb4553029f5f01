"""Rotary position embedding: its tables, made once for each size of image, and the rotation by torch.

A table has a row for each token of an image: the cosines of D/2 angles, then their sines. Two channels of a head are
rotated by one angle: q′ᵢ = qᵢ cos θ − qⱼ sin θ, q′ⱼ = qⱼ cos θ + qᵢ sin θ, where j is i + D/2 ("rotate half"; DINOv3),
or (i, j) = (2i, 2i + 1) (EVA-02; Su et al. 2021). Prefix tokens have no position: cosine 1, sine 0. The rotation is
linear, so that 1/√D may be in q before it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vtk.errors import UsageError
from vtk.fused.checks import copied
from vtk.fused.norms import refusal
from vtk.fused.onednn_prepack import observed
from vtk.fused.sizes import Derived, Grid, SizeCache, Stamps, derive_again, stamps


def rotate(x: Tensor, rope: Tensor, rotate_half: bool) -> Tensor:
    """Rotate the channels of every head.

    Args:
        x: (B, N, H, D), of queries or keys.
        rope: (R, D) or for each head (H, R, D), R ≥ N: cosines, then sines, in fp32 or fp64.
        rotate_half: pairs are (i, i + D/2), else (2i, 2i + 1).

    Returns:
        As x, computed in the wider of both types.
    """
    cos, sin = _by_token(rope, x.shape[1]).chunk(2, -1)  # (N, 1 or H, D/2)
    first, second = x.chunk(2, -1) if rotate_half else (x[..., ::2], x[..., 1::2])
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(parts, -1) if rotate_half else torch.stack(parts, -1).flatten(-2)
    return turned.to(x.dtype)


def turns_of(rope: Tensor, tokens: int) -> Tensor:
    """Return the first so many rows of a table (R, D) or (H, R, D) as complex numbers, (N, 1 or H, D/2)."""
    cos, sin = _by_token(rope, tokens).chunk(2, -1)
    return torch.complex(cos.contiguous(), sin.contiguous())


def rotate_packed_(qkv: Tensor, columns: int, turns: Tensor) -> None:
    """Rotate channels 2i and 2i + 1 of every head of q and k, in place and in one pass, as complex numbers.

    Args:
        qkv: (B, N, columns + V), contiguous, fp32 or fp64.
        columns: of q and k together, whose heads are a multiple of those of ``turns``.
        turns: (N, 1 or H, D/2), of `turns_of`.
    """
    pairs = torch.view_as_complex(qkv.view(*qkv.shape[:2], -1, 2))[..., : columns // 2]
    pairs.view(*qkv.shape[:2], -1, *turns.shape[1:]).mul_(turns[:, None])


def read_tables(embed: Tensor, rotate_half: bool, prefix: int) -> Tensor:
    """Return rotary tables from timm's form of them.

    Args:
        embed: (..., N, 2·D), of patches: sines of each channel, then cosines.
        rotate_half: which channels are a pair.
        prefix: tokens before the patches.

    Returns:
        (..., prefix + N, D), in fp32, in fp64 where ``embed`` is.

    Raises:
        UsageError: the two channels of a pair have different angles.
    """
    halves = []
    for part in embed.chunk(2, -1):
        a, b = part.chunk(2, -1) if rotate_half else (part[..., ::2], part[..., 1::2])
        if not embed.is_meta and not torch.equal(a, b):
            raise UsageError(
                "cannot fuse `rope`: the two channels that its attention rotates together have different angles; use "
                "the back-end eager or compile, or export without --fuse"
            )
        halves.append(a)
    sin, cos = halves
    table = torch.cat((cos, sin), -1).to(torch.promote_types(embed.dtype, torch.float32))
    still = table.new_zeros((*table.shape[:-2], prefix, table.shape[-1]))
    still[..., : cos.shape[-1]] = 1
    return torch.cat((still, table), -2)


class Rotary(Derived):
    """The rotary tables of a model, for images of any size it takes.

    Attributes:
        rope: timm's module, in fp32 or fp64 whatever the type of the model.
        table: (T, R, D), or (T, H, R, D) where heads differ, of the model's own size; T is 1, or the number of blocks
            where each has its own. It follows from ``rope``, also when that changes in place, and is in no state dict.
        constant: the attentions hold it as a constant, after `separate_qkv`: no other size is taken then.
    """

    table: Tensor

    def __init__(
        self, rope: Any, like: Tensor, *, grid: Grid, dynamic: bool, rotate_half: bool, prefix: int, per_block: bool
    ) -> None:
        """Take timm's module over.

        Args:
            rope: with ``get_embed``, as `timm.layers.create_rope_embed` makes it; it is copied.
            like: device and dtype of the arithmetic.
            grid: the model's own height and width in patches.
            dynamic: whether images of other sizes are taken.
            rotate_half: which channels the attention rotates together.
            prefix: tokens of an image before its patches.
            per_block: whether the first axis of its tables is the block.

        Raises:
            UsageError: the module rotates other pairs of channels than the attention.
        """
        super().__init__()
        if not callable(getattr(rope, "get_embed", None)):
            raise refusal("rope", rope, "it has no `get_embed`")
        self.rope = copied(rope).to(like.dtype)
        self.grid, self.dynamic = grid, dynamic
        self.rotate_half, self.prefix, self.per_block = rotate_half, prefix, per_block
        self.sizes, self.own = SizeCache(), _Unbound()
        self.constant = False
        self.register_buffer("table", self._make(grid), persistent=False)
        self.register_load_state_dict_post_hook(derive_again)
        self.note()

    @property
    def head_dim(self) -> int:
        """D."""
        return self.table.shape[-1]

    def tables(self, grid: Grid) -> Sequence[Tensor]:
        """Return T tables, (R, D) or (H, R, D) each, for images of ``grid`` patches.

        Raises:
            UsageError: the tables are constants of another size.
        """
        if grid == self.grid:
            if not self.constant:
                self.follow()
            return self.own.of(self.table)
        if self.constant:
            raise UsageError(
                f"images of {grid[0]} × {grid[1]} patches: this model was made for exporters and takes "
                f"{self.grid[0]} × {self.grid[1]}, of which its rotary tables are; fuse a model of that size"
            )
        return self.sizes.get(grid, stamps(self.rope), lambda: self._make(grid).to(self.table)).unbind(0)

    def sources(self) -> Stamps:
        """Return the state of ``rope``."""
        return stamps(self.rope)

    def derive(self) -> None:
        """Write the table of the model's own size anew; `sizes` follows by itself."""
        self.table.copy_(self._make(self.grid))

    def _make(self, grid: Grid) -> Tensor:
        fixed = not self.dynamic and hasattr(self.rope, "feat_shape")
        with torch.no_grad():
            embed = self.rope.get_embed() if fixed else self.rope.get_embed(shape=list(grid))
            table = read_tables(embed, self.rotate_half, self.prefix)
        return table if self.per_block else table[None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.sizes.clear()
        return super()._apply(functools.partial(_keep_wide, fn), recurse)


class _Unbound:
    """The tables of a tensor of them, as long as it is the same: who derives something of one can tell by identity."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def __reduce__(self) -> tuple[type["_Unbound"], tuple[()]]:
        """Copy and pickle as empty."""
        return _Unbound, ()

    def of(self, table: Tensor) -> Sequence[Tensor]:
        if observed() or type(table) is not Tensor:
            return table.unbind(0)
        if self._kept is None or self._kept[0] is not table:
            self._kept = table, table.unbind(0)
        return self._kept[1]


def _keep_wide(fn: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Move a tensor as ``fn`` does, but never to fewer than 32 bits: angles are multiples of positions."""
    moved = fn(t)
    narrow = t.is_floating_point() and moved.dtype.itemsize < 4
    return t.to(moved.device, torch.float32) if narrow else moved


def _by_token(rope: Tensor, tokens: int) -> Tensor:
    """Return the rows of the first so many tokens, with an axis of heads behind theirs."""
    rows = rope[..., :tokens, :]
    return rows[:, None] if rope.ndim == 2 else rows.transpose(0, 1)
