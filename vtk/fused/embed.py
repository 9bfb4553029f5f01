"""Embedding of images: the stem, the position table, the prefix tokens and the norm before the first block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from vtk.fused.batch_norms import fold_batch_norms
from vtk.fused.checks import copied, is_identity
from vtk.fused.norms import NormSpec, normalize, read_norm
from vtk.fused.patches import check_images, padded_matrix, takes_patches, token_table
from vtk.fused.sizes import Derived, Grid, SizeCache, Stamps, derive_again, stamps
from vtk.fused.stages import Plan, frozen
from vtk_kernels.add_norm import add_norm
from vtk_kernels.patchify import patchify
from vtk_kernels.patchify_counters import patchify_counters


@dataclass(frozen=True)
class TokenParts:
    """What a family's model makes its tokens of.

    Attributes:
        stem: from images to patches: (B, N, C), or (B, height, width, C) where ``dynamic``.
        prefix: class and register tokens, (1, n, C) each.
        pos_embed: (1, N, C), or (1, prefix + N, C) where prefix tokens have positions; None for none.
        own: how many rows of ``pos_embed`` are the prefix tokens'.
        dynamic: whether ``pos_embed`` is resampled to the grid of the images.
        norm_pre: before the first block, or the identity.
        resampler: a module that gives the patches' positions (1, N, C) for a grid, in place of ``pos_embed``; for a
            ``dynamic`` model that resamples them in a way of its own.
    """

    stem: Any
    prefix: Sequence[Tensor]
    pos_embed: Tensor | None
    own: int
    dynamic: bool
    norm_pre: Any
    resampler: Any = None


class Embedding(Derived):
    """Stem, position table, prefix tokens and, where the model has one, the norm before the first block.

    Attributes:
        stem: of the model, on the CPU and for exporters run as it is.
        prefix: (1, prefix, C), class and register tokens with their positions.
        pos_embed: (1, N, C), of the patches; None for a dynamic model, which has its table in ``full``, or what makes
            it in ``resampler`` and the one of its own size in ``resampled``.
        table: (1, prefix + N, C), all that the CUDA plan adds to the product of patches at the model's own size, None
            for stems that are not one. It and ``padded`` follow from the parameters, also when these change in place,
            and are in no state dict. Those of other sizes are made at their first call.
        padded: (C, width), the stem's weight with zero columns, None where it needs none and a view of it does.
    """

    resampled: Tensor | None
    table: Tensor | None
    padded: Tensor | None

    def __init__(self, parts: TokenParts, like: Tensor) -> None:
        super().__init__()
        self.stem = fold_batch_norms(copied(parts.stem).to(like.dtype))
        prefix = [t.detach().to(like.dtype) for t in parts.prefix]
        tokens = torch.cat(prefix, 1) if prefix else None
        table = None if parts.pos_embed is None else parts.pos_embed.detach().to(like.dtype)
        self.own = 0 if tokens is None else parts.own
        self.dynamic = parts.dynamic
        self.full = frozen(table) if self.dynamic else None
        if table is not None and tokens is not None and self.own:
            tokens = tokens + table[:, : self.own]
        self.prefix = frozen(tokens)  # (1, prefix, C), with its positions
        self.pos_embed = None if table is None or self.dynamic else frozen(table[:, self.own :])  # (1, N, C)
        self.pre: NormSpec | None = None
        self.pre_weight, self.pre_bias = None, None
        if not is_identity(parts.norm_pre):
            # its output is the residual stream itself, so that there is no matrix to take the affine part
            self.pre, affine = read_norm(parts.norm_pre, like, "norm_pre")
            self.pre_weight, self.pre_bias = frozen(affine.weight), frozen(affine.bias)
        self.resampler = None if parts.resampler is None else parts.resampler.to(like.dtype)
        self.register_buffer("resampled", None, persistent=False)
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("padded", None, persistent=False)
        self.by_patches = takes_patches(self.stem) and (self.dynamic or self.stem.strict_img_size)
        self.positions, self.tables = SizeCache(), SizeCache()
        if self.resampler is not None:
            self.resampled = self.resampler(self.grid).detach()
        if self.by_patches:
            self.table, self.padded = self._table(self.grid), padded_matrix(self.stem)
        self.register_load_state_dict_post_hook(derive_again)
        self.note()

    def sources(self) -> Stamps:
        """Return the state of the parameters that tables are made of."""
        conv = self.stem.proj if self.by_patches else None
        return stamps(self.full, self.pos_embed, self.resampler, self.prefix, conv)

    def derive(self) -> None:
        """Write the tables of the model's own size anew; those of others follow by themselves."""
        if self.resampler is not None and self.resampled is not None:
            self.resampled.copy_(self.resampler(self.grid))
        if self.table is not None:
            self.table.copy_(self._table(self.grid))
        if self.padded is not None and (padded := padded_matrix(self.stem)) is not None:
            self.padded.copy_(padded)

    @property
    def grid(self) -> Grid:
        """The model's own height and width in patches."""
        stem: Any = self.stem
        height, width = stem.grid_size
        return int(height), int(width)

    def grid_of(self, images: Tensor) -> Grid:
        """Return height and width in patches of images (B, chans, height, width)."""
        if not self.dynamic:
            return self.grid
        stem: Any = self.stem
        height, width = stem.dynamic_feat_size(tuple(images.shape[-2:]))
        return int(height), int(width)

    def table_for(self, images: Tensor) -> Tensor | None:
        """Return what the CUDA plan adds to the product of these images' patches, None for a stem that is none."""
        self.follow()
        if self.table is None or images.ndim != 4 or (grid := self.grid_of(images)) == self.grid:
            return self.table
        return self.tables.get(grid, self._state(), lambda: self._table(grid))

    def prepare(self, images: Tensor) -> None:
        """Make the tables for images of this size, before a CUDA graph reads them."""
        self.follow()
        if self.dynamic and (grid := self.grid_of(images)) != self.grid:
            self._positions(grid)
            self.table_for(images)

    def _state(self) -> Stamps:
        conv = getattr(self.stem, "proj", None)
        return stamps(self.full, self.resampler, self.prefix, getattr(conv, "bias", None))

    def _table(self, grid: Grid) -> Tensor:
        return token_table(self.stem, self.prefix, self._positions(grid), grid)

    def _positions(self, grid: Grid) -> Tensor | None:
        """Return the positions of the patches, (1, N, C), None for none: resampled as timm does where they must be."""
        if (make := self.resampler) is not None:
            return self.resampled if grid == self.grid else self.positions.get(grid, stamps(make), lambda: make(grid))
        if self.full is None:
            return self.pos_embed
        if grid == self.grid:
            own_size: Tensor = self.full[:, self.own :]
            return own_size
        return self.positions.get(grid, stamps(self.full), lambda: self._resample(grid))

    def _resample(self, grid: Grid) -> Tensor:
        assert self.full is not None
        table = resample_abs_pos_embed(self.full, list(grid), list(self.grid), num_prefix_tokens=self.own)
        return table[:, self.own :].clone()

    def _positions_in_graph(self, grid: Grid) -> Tensor | None:
        """Return the positions for an exporter's symbolic height and width: the graph resamples them."""
        if self.resampler is not None:
            return self.resampler(grid)  # type: ignore[no-any-return]
        return self.pos_embed if self.full is None else self._resample(grid)

    def forward(self, images: Tensor, norm: NormSpec, plan: Plan, counters: int = 0) -> tuple[Tensor, ...]:
        """Map images to tokens and their form normalised for the first stage, both (B, prefix + N, C).

        Args:
            images: (B, chans, height, width), of the model's type.
            norm: of the first stage.
            plan: with kernels, a product of patches takes three of them.
            counters: so many int32 zeros are a third result, with kernels where `table` is no None; 0 for none.

        Raises:
            UsageError: images of a size that the stem does not take.
        """
        check_images(self.stem, images)
        self.follow()
        table = self.table_for(images) if plan.kernels else None
        if table is not None:
            conv: Any = self.stem.proj
            matrix = conv.weight.flatten(1) if self.padded is None else self.padded
            prefix = 0 if self.prefix is None else self.prefix.shape[1]
            if counters:
                rows, *zeros = patchify_counters(images, conv.kernel_size, prefix, matrix.shape[1], counters)
            else:
                rows, zeros = patchify(images, conv.kernel_size, prefix, matrix.shape[1]), []
            added = F.linear(rows, matrix)
            if self.pre is None:
                return *add_norm(table, added, norm.eps, rms=norm.kind == "rms")[:2], *zeros
            x = self._before_blocks(table + added)
        else:
            x, zeros = self._before_blocks(self._tokens(self.stem(images))), []
        return x, normalize(x, norm, plan.kernels), *zeros

    def _tokens(self, x: Tensor) -> Tensor:
        """Add to the stem's output what does not depend on the image."""
        positions = self.pos_embed
        if self.dynamic:
            grid = x.shape[1], x.shape[2]
            fixed = all(isinstance(n, int) for n in grid)
            positions = self._positions(grid) if fixed else self._positions_in_graph(grid)
        if x.ndim == 4:
            x = x.flatten(1, 2)
        if positions is not None:
            x = x + positions
        if self.prefix is not None:
            x = torch.cat((self.prefix.expand(x.shape[0], -1, -1), x), 1)
        return x

    def _before_blocks(self, x: Tensor) -> Tensor:
        if self.pre is not None and self.pre_weight is not None:
            if self.pre.kind == "rms":
                return F.rms_norm(x, x.shape[-1:], self.pre_weight, self.pre.eps)
            return F.layer_norm(x, x.shape[-1:], self.pre_weight, self.pre_bias, self.pre.eps)
        return x

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.positions.clear()
        self.tables.clear()
        return super()._apply(fn, recurse)
