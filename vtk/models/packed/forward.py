"""The forward pass over tokens of many tasks and resolutions, packed into one matrix of rows.

Norms, FFNs and LayerScale act on single rows, so they run once over the rows of all tasks. Three operations do not: the
attention projections, whose weights are the task's; attention, which is within an image; and Context Broadcasting,
whose mean is over an image's tokens. Blocks are timm's modules; of their attention modules only the structure is used,
not the weights.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import timm.models.vision_transformer as vit
import torch
import torch.nn.functional as F
from timm.layers import GELU, Attention, GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.packed.rows import RMS_NORMS, Layer, Rows, Stack
from vtk.models.packed.segments import Segments
from vtk.models.transforms.context_broadcast import ContextBroadcast, find_context_broadcast, own_class
from vtk_kernels.packed_attention import packed_attention

__all__ = ["Layer", "Segments", "Stack", "attention_modules", "own_parameters", "packed_forward"]

_LAYER_NORMS = (nn.LayerNorm,)
_FFNS = (Mlp, GluMlp, SwiGLU)
# modules with classes that act on single rows; Identity is in the second
_ACTIVATIONS = ("torch.nn.modules.activation", "torch.nn.modules.linear", "timm.layers.activations")


def attention_modules(blocks: Iterable[nn.Module]) -> list[tuple[str, Attention]]:
    """Return the attention modules of timm's blocks with their names, in the order in which `packed_forward` runs them.

    Raises:
        UsageError: names an unsupported block, attention or FFN.
    """
    found: list[tuple[str, Any]] = []
    ffns: list[tuple[str, Any]] = []
    for i, block in enumerate(blocks):
        if type(block) is vit.Block:
            found.append((f"blocks.{i}.attn", block.attn))
            ffns.append((f"blocks.{i}.mlp", block.mlp))
        elif isinstance(block, vit.ParallelThingsBlock):
            found += [(f"blocks.{i}.attns.{j}.attn", branch.attn) for j, branch in enumerate(block.attns)]
            ffns += [(f"blocks.{i}.ffns.{j}.mlp", branch.mlp) for j, branch in enumerate(block.ffns)]
        else:
            raise _refusal(f"blocks.{i}", block, "only timm's Block and ParallelThingsBlock can be packed")
    for name, attn in found:
        # not a subclass, which may compute something else
        if own_class(attn) is not Attention or attn.gate is not None or not isinstance(attn.norm, nn.Identity):
            raise _refusal(name, attn, "only timm's Attention without gate and inner norm can be packed")
        _check_norm(f"{name}.q_norm", attn.q_norm)
        _check_norm(f"{name}.k_norm", attn.k_norm)
    for name, mlp in ffns:
        if own_class(mlp) not in _FFNS:
            raise _refusal(name, mlp, "only timm's Mlp, GluMlp and SwiGLU act on single tokens")
        if not type(mlp.act).__module__.startswith(_ACTIVATIONS):
            raise _refusal(f"{name}.act", mlp.act, "only torch's and timm's activations can be packed")
        _check_norm(f"{name}.norm", mlp.norm)
    return found


def own_parameters(attn: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of an attention module that belong to the task: all except Context Broadcasting's Λ."""
    return {name: p for name, p in attn.named_parameters() if not name.startswith("cb.")}


def packed_forward(
    shared: Iterable[nn.Module], tasks: Iterable[Layer], segments: Segments, x: Tensor, *, kernels: bool = False
) -> Tensor:
    """Run blocks over packed rows; differentiable, without stochastic depth.

    Args:
        shared: timm's `Block` or `ParallelThingsBlock` modules, also with Context Broadcasting.
        tasks: the weights of all tasks for each attention module, in the order of `attention_modules`. They are read
            layer by layer, so an iterator may wait for weights that are still being copied.
        segments: of the rows.
        x: (T, C); rows after the last segment are padding: their result is undefined and affects no other row.
        kernels: use the grouped product, variable-length attention and Context Broadcasting of `vtk_kernels` (on a CPU
            their references; needs stacked tensors); otherwise a loop over the tasks' rows.

    Returns:
        (T, C), the output of the last block.
    """
    rows, layers = Rows(segments, x, kernels), iter(tasks)
    for module in shared:
        block: Any = module
        if isinstance(block, vit.ParallelThingsBlock):
            attns = [(b.norm, b.attn, b.ls, next(layers)) for b in block.attns]
            ffns = [(b.norm, b.mlp, b.ls) for b in block.ffns]
            x = _attention(x, attns, getattr(block, "cb_msa", None), rows)
            x = _ffn(x, ffns, getattr(block, "cb", None), rows)
        else:
            x = _attention(x, [(block.norm1, block.attn, block.ls1, next(layers))], None, rows)
            x = _ffn(x, [(block.norm2, block.mlp, block.ls2)], None, rows)
    return x


def _attention(x: Tensor, branches: Sequence[Any], end: ContextBroadcast | None, rows: Rows) -> Tensor:
    """Return x + Σ attention: P branches as one attention with P·H heads."""
    packed = []
    for norm, attn, _, layer in branches:
        h = norm(x)
        if _placement(attn) == "front":
            h = rows.broadcast(h, attn.cb)
        packed.append(rows.head_norms(rows.linear(h, layer, "qkv"), attn, layer))
    first = branches[0][1]
    heads, width = first.num_heads, first.attn_dim
    # rows of q of all branches, then k, then v
    qkv = packed[0] if len(packed) == 1 else torch.stack([p.unflatten(1, (3, width)) for p in packed], 2).flatten(1)
    out = packed_attention(
        qkv, heads * len(branches), rows.segments.cu_seqlens, scale=first.head_dim**-0.5, max_seqlen=rows.longest
    )
    parts = []
    for (_, attn, ls, layer), o in zip(branches, out.split(width, 1), strict=True):
        y = rows.linear(o, layer, "proj")
        if _placement(attn) == "end":
            y, end = (y, attn.cb) if len(branches) == 1 else (rows.broadcast(y, attn.cb), end)
        parts.append(ls(y))
    return rows.add(x, parts, end)


def _ffn(x: Tensor, branches: Sequence[Any], end: ContextBroadcast | None, rows: Rows) -> Tensor:
    """Return x + Σ FFN."""
    parts = []
    for norm, mlp, ls in branches:
        h, placement = norm(x), _placement(mlp)
        if placement == "front":
            h = rows.broadcast(h, mlp.cb)
        if placement is None:
            y = _mlp(mlp, h)
        elif placement == "mid":
            y = mlp.drop2(mlp.fc2(rows.broadcast(mlp.norm(mlp.drop1(mlp.act(mlp.fc1(h)))), mlp.cb)))
        else:
            kind: Any = type(mlp).__bases__[0]  # Context Broadcasting is in a subclass
            y = kind.forward(mlp, h)
        if placement == "end":
            y, end = (y, mlp.cb) if len(branches) == 1 else (rows.broadcast(y, mlp.cb), end)
        parts.append(ls(y))
    return rows.add(x, parts, end)


def _mlp(mlp: Any, h: Tensor) -> Tensor:
    """Run an FFN; on a CPU with GELU in place, since a second wide tensor takes longer than the activation."""
    plain = type(mlp) is Mlp and type(mlp.act) in (nn.GELU, GELU) and getattr(mlp.act, "approximate", "none") == "none"
    if not plain or h.is_cuda or torch.is_grad_enabled() or not isinstance(mlp.norm, nn.Identity):
        y: Tensor = mlp(h)
        return y
    return F.linear(torch.ops.aten.gelu_(mlp.fc1(h)), mlp.fc2.weight, mlp.fc2.bias)


def _placement(module: Any) -> str | None:
    return None if find_context_broadcast(module) is None else module.cb_placement


def _check_norm(name: str, norm: nn.Module) -> None:
    if type(norm) is not nn.Identity and not isinstance(norm, _LAYER_NORMS + RMS_NORMS):
        raise _refusal(name, norm, "only LayerNorm and RMSNorm can be packed")


def _refusal(name: str, module: nn.Module, reason: str) -> UsageError:
    return UsageError(f"`{name}` is a {type(module).__name__}: {reason}; serve this model separately")
