"""Both ends of the model: patch embedding of images, and the classification head."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from vtk.fused.batch_norms import fold_batch_norms
from vtk.fused.checks import copied, is_identity
from vtk.fused.fold import fold_input
from vtk.fused.norms import NormSpec, normalize, read_linear, read_norm, refusal
from vtk.fused.patches import check_images, padded_matrix, takes_patches, token_table
from vtk.fused.stages import Plan, frozen
from vtk_kernels.add_norm import add_norm
from vtk_kernels.patchify import patchify
from vtk_kernels.patchify_counters import patchify_counters


class Embedding(nn.Module):
    """Stem, position table, prefix tokens and, where the model has one, the norm before the first block.

    Attributes:
        stem: of the model, on the CPU and for exporters run as it is.
        prefix: (1, prefix, C), class and register tokens with their positions.
        pos_embed: (1, N, C), of the patches.
        table: (1, prefix + N, C), all that the CUDA plan adds to the product of patches, None for stems that are not
            one. It and ``padded`` follow from the parameters: they are in no state dict and made anew when one loads.
        padded: (C, width), the stem's weight with zero columns, None where it needs none and a view of it does.
    """

    table: Tensor | None
    padded: Tensor | None

    def __init__(self, model: Any, like: Tensor) -> None:
        super().__init__()
        self.stem = fold_batch_norms(copied(model.patch_embed).to(like.dtype))
        prefix = [t.detach().to(like.dtype) for t in (model.cls_token, model.reg_token) if t is not None]
        tokens = torch.cat(prefix, 1) if prefix else None
        table = None if model.pos_embed is None else model.pos_embed.detach().to(like.dtype)
        self.own = 0 if tokens is None or model.no_embed_class else tokens.shape[1]
        self.dynamic = bool(model.dynamic_img_size)
        self.full = frozen(table) if self.dynamic else None
        if table is not None and tokens is not None and self.own:
            tokens = tokens + table[:, : self.own]
        self.prefix = frozen(tokens)  # (1, prefix, C), with its positions
        self.pos_embed = None if table is None or self.dynamic else frozen(table[:, self.own :])  # (1, N, C)
        self.pre: NormSpec | None = None
        self.pre_weight, self.pre_bias = None, None
        if not is_identity(model.norm_pre):
            # its output is the residual stream itself, so that there is no matrix to take the affine part
            self.pre, affine = read_norm(model.norm_pre, like, "norm_pre")
            self.pre_weight, self.pre_bias = frozen(affine.weight), frozen(affine.bias)
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("padded", None, persistent=False)
        self.by_patches = takes_patches(self.stem) and not self.dynamic
        self._derive()
        self.register_load_state_dict_post_hook(_derive_again)

    def _derive(self) -> None:
        if self.by_patches:
            self.table = token_table(self.stem, self.prefix, self.pos_embed)
            self.padded = padded_matrix(self.stem)

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
        if plan.kernels and self.table is not None:
            conv: Any = self.stem.proj
            matrix = conv.weight.flatten(1) if self.padded is None else self.padded
            prefix = 0 if self.prefix is None else self.prefix.shape[1]
            if counters:
                rows, *zeros = patchify_counters(images, conv.kernel_size, prefix, matrix.shape[1], counters)
            else:
                rows, zeros = patchify(images, conv.kernel_size, prefix, matrix.shape[1]), []
            added = F.linear(rows, matrix)
            if self.pre is None and norm.kind == "layer":
                return *add_norm(self.table, added, norm.eps)[:2], *zeros
            x = self._before_blocks(self.table + added)
        else:
            x, zeros = self._before_blocks(self._tokens(self.stem(images))), []
        return x, normalize(x, norm, plan.kernels), *zeros

    def _tokens(self, x: Tensor) -> Tensor:
        """Add to the stem's output what does not depend on the image."""
        if self.dynamic and self.full is not None:
            x = self._dynamic(x)
        elif x.ndim == 4:
            x = x.flatten(1, 2)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        if self.prefix is not None:
            x = torch.cat((self.prefix.expand(x.shape[0], -1, -1), x), 1)
        return x

    def _before_blocks(self, x: Tensor) -> Tensor:
        if self.pre is not None and self.pre_weight is not None:
            if self.pre.kind == "rms":
                return F.rms_norm(x, x.shape[-1:], self.pre_weight, self.pre.eps)
            return F.layer_norm(x, x.shape[-1:], self.pre_weight, self.pre_bias, self.pre.eps)
        return x

    def _dynamic(self, x: Tensor) -> Tensor:
        """Add the table resampled to the grid of x (B, height, width, C), as timm does at every call."""
        assert self.full is not None
        grid: Any = self.stem.grid_size
        table = resample_abs_pos_embed(
            self.full, new_size=[x.shape[1], x.shape[2]], old_size=list(grid), num_prefix_tokens=self.own
        )
        return x.flatten(1, 2) + table[:, self.own :]


class Head(nn.Module):
    """Pooling and classifier; the last norm's affine part is in the classifier where the pooling lets it pass.

    Attributes:
        norm: how the last block's output is normalised, None for not at all.
        first_token_only: whether only the class token is read.
    """

    def __init__(self, model: Any, like: Tensor) -> None:
        super().__init__()
        self.pool, self.prefix = model.global_pool, model.num_prefix_tokens
        self.include_prefix = bool(model.pool_include_prefix)
        self.attn_pool = None
        if model.attn_pool is not None:
            self.attn_pool = copied(model.attn_pool).to(like.dtype)
        elif self.pool not in ("", "token", "avg", "avgmax", "max"):
            raise refusal("global_pool", model, f"pooling `{self.pool}` is not known")
        self.first_token_only = self.attn_pool is None and self.pool == "token"
        head = model.head
        linear = None if is_identity(head) else read_linear(head, like, "head")

        self.norm: NormSpec | None = None
        self.fc_norm: NormSpec | None = None
        self.weight, self.bias = None, None  # of the norm, where it must be applied before the pooling
        affine = None
        if not is_identity(model.norm):
            self.norm, affine = read_norm(model.norm, like, "norm")
        passes = self.attn_pool is None and self.pool in ("", "token", "avg") and linear is not None
        passes = passes and is_identity(model.fc_norm)  # its statistics are of what stands before it
        if affine is not None and not passes:
            self.weight, self.bias = frozen(affine.weight), frozen(affine.bias)
            affine = None
        self.fc_weight, self.fc_bias = None, None
        if not is_identity(model.fc_norm):
            self.fc_norm, fc_affine = read_norm(model.fc_norm, like, "fc_norm")
            if linear is None:
                self.fc_weight, self.fc_bias = frozen(fc_affine.weight), frozen(fc_affine.bias)
            else:
                affine = fc_affine
        self.w_head, self.b_head = None, None
        if linear is not None:
            w, b = fold_input(*linear, affine) if affine is not None and self.fc_weight is None else linear
            self.w_head, self.b_head = frozen(w), frozen(b)

    def forward(self, h: Tensor, kernels: bool) -> Tensor:
        """Map normalised tokens (B, N, C) to logits (B, classes)."""
        if self.weight is not None:
            h = h * self.weight + self.bias
        h = self._pool(h)
        if self.fc_norm is not None:
            h = normalize(h, self.fc_norm, kernels)
            if self.fc_weight is not None:
                h = h * self.fc_weight + self.fc_bias
        return h if self.w_head is None else F.linear(h, self.w_head, self.b_head)

    def _pool(self, h: Tensor) -> Tensor:
        if self.pool == "token" and self.attn_pool is None:
            return h[:, 0]
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
