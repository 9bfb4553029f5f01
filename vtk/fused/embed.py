"""Both ends of the model: patch embedding of images, and the classification head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.batch_norms import fold_batch_norms
from vtk.fused.checks import copied, is_identity
from vtk.fused.fold import fold_input
from vtk.fused.norms import NormSpec, normalize, read_linear, read_norm
from vtk.fused.patches import check_images, padded_matrix, takes_patches, token_table
from vtk.fused.sizes import Grid, SizeCache, Stamps, stamps
from vtk.fused.stages import Plan, frozen
from vtk_kernels.add_norm import add_norm
from vtk_kernels.patchify import patchify
from vtk_kernels.patchify_counters import patchify_counters

_LINEAR = ("", "token", "tokens", "avg")
"""Poolings that a factor and a bias of each channel pass through."""

_HEADS = ("head", "head_dist")


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


class Embedding(nn.Module):
    """Stem, position table, prefix tokens and, where the model has one, the norm before the first block.

    Attributes:
        stem: of the model, on the CPU and for exporters run as it is.
        prefix: (1, prefix, C), class and register tokens with their positions.
        pos_embed: (1, N, C), of the patches; None for a dynamic model, which has its table in ``full``, or what makes
            it in ``resampler`` and the one of its own size in ``resampled``.
        table: (1, prefix + N, C), all that the CUDA plan adds to the product of patches at the model's own size, None
            for stems that are not one. It and ``padded`` follow from the parameters: they are in no state dict and made
            anew when one loads. Those of other sizes are made at their first call.
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
        self._derive()
        self.register_load_state_dict_post_hook(_derive_again)

    def _derive(self) -> None:
        self.positions.clear()
        self.tables.clear()
        if self.resampler is not None:
            self.resampled = self.resampler(self.grid).detach()
        if self.by_patches:
            self.table = self._table(self.grid)
            self.padded = padded_matrix(self.stem)

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
        if self.table is None or images.ndim != 4 or (grid := self.grid_of(images)) == self.grid:
            return self.table
        return self.tables.get(grid, self._state(), lambda: self._table(grid))

    def prepare(self, images: Tensor) -> None:
        """Make the tables for images of this size, before a CUDA graph reads them."""
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


@dataclass(frozen=True)
class HeadParts:
    """What a family's model makes logits of.

    Attributes:
        norm: behind the last block, or the identity.
        pool: timm's name of the pooling; or "tokens" for the mean of as many heads, each of one of the first tokens.
        prefix: tokens of an image before its patches.
        include_prefix: whether the pooling reads them.
        attn_pool: a module that pools by attention, in place of ``pool``; None for none.
        fc_norm: behind the pooling, or the identity.
        head: the classifier, or the identity; for "tokens" several.
    """

    norm: Any
    pool: str
    prefix: int
    include_prefix: bool
    attn_pool: Any
    fc_norm: Any
    head: Any


class Head(nn.Module):
    """Pooling and classifier; the last norm's affine part is in the classifier where the pooling lets it pass.

    Attributes:
        norm: how the last block's output is normalised, None for not at all.
        queries: how many of the first tokens are read, None for all.
        w_head, b_head: (classes, C), (classes), of "tokens" (classes, n·C); None for no classifier.
    """

    def __init__(self, parts: HeadParts, like: Tensor) -> None:
        super().__init__()
        self.pool, self.prefix = parts.pool, parts.prefix
        self.include_prefix = parts.include_prefix
        self.attn_pool = None
        if parts.attn_pool is not None:
            self.attn_pool = copied(parts.attn_pool).to(like.dtype)
        elif self.pool not in (*_LINEAR, "avgmax", "max"):
            raise UsageError(
                f"cannot fuse `global_pool`: pooling `{self.pool}` is not known; use the back-end eager or compile"
            )
        heads = {"head": parts.head} if self.pool != "tokens" else dict(zip(_HEADS, parts.head, strict=True))
        self.queries = len(heads) if self.attn_pool is None and self.pool in ("token", "tokens") else None
        linears = [read_linear(head, like, name) for name, head in heads.items() if not is_identity(head)]

        self.norm: NormSpec | None = None
        self.fc_norm: NormSpec | None = None
        self.weight, self.bias = None, None  # of the norm, where it must be applied before the pooling
        affine = None
        if not is_identity(parts.norm):
            self.norm, affine = read_norm(parts.norm, like, "norm")
        passes = self.attn_pool is None and self.pool in _LINEAR and bool(linears)
        passes = passes and is_identity(parts.fc_norm)  # its statistics are of what stands before it
        if affine is not None and not passes:
            self.weight, self.bias = frozen(affine.weight), frozen(affine.bias)
            affine = None
        self.fc_weight, self.fc_bias = None, None
        if not is_identity(parts.fc_norm):
            self.fc_norm, fc_affine = read_norm(parts.fc_norm, like, "fc_norm")
            if not linears:
                self.fc_weight, self.fc_bias = frozen(fc_affine.weight), frozen(fc_affine.bias)
            else:
                affine = fc_affine
        self.w_head, self.b_head = None, None
        if linears:
            if affine is not None:
                linears = [fold_input(*linear, affine) for linear in linears]
            self.w_head = frozen(torch.cat([w for w, _ in linears], 1) / len(linears))
            self.b_head = frozen(torch.stack([b for _, b in linears]).mean(0))

    def forward(self, h: Tensor, kernels: bool) -> Tensor:
        """Map normalised tokens (B, N, C) to logits (B, classes)."""
        if self.weight is None or self.bias is None:
            h = self._pool(h)
        elif self.attn_pool is None and self.pool in _LINEAR:  # of fewer tokens it is less work
            h = torch.addcmul(self.bias, self._pool(h), self.weight)
        else:
            h = self._pool(torch.addcmul(self.bias, h, self.weight))
        if self.fc_norm is not None:
            h = normalize(h, self.fc_norm, kernels)
            if self.fc_weight is not None and self.fc_bias is not None:
                h = torch.addcmul(self.fc_bias, h, self.fc_weight)
        return h if self.w_head is None else F.linear(h, self.w_head, self.b_head)

    def _pool(self, h: Tensor) -> Tensor:
        if self.pool == "token" and self.attn_pool is None:
            return h[:, 0]
        if self.pool == "tokens":  # the mean over heads is in their matrix
            first = h[:, : self.queries]
            return first.mean(1) if self.w_head is None else first.flatten(1)
        if self.pool == "":
            return h
        h = h if self.include_prefix or self.prefix == 0 else h[:, self.prefix :]
        if self.attn_pool is not None:
            return self.attn_pool(h)
        if self.pool == "avg":
            return h.mean(1)
        return h.amax(1) if self.pool == "max" else 0.5 * (h.amax(1) + h.mean(1))


def _derive_again(embedding: Embedding, incompatible_keys: Any) -> None:
    embedding._derive()
