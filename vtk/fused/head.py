"""Classification head: the norm behind the last block, the pooling, a second norm and the classifier."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.checks import copied, is_identity
from vtk.fused.fold import fold_input
from vtk.fused.norms import NormSpec, normalize, read_linear, read_norm
from vtk.fused.stages import frozen

_LINEAR = ("", "token", "tokens", "avg")
"""Poolings that a factor and a bias of each channel pass through."""

_HEADS = ("head", "head_dist")


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
