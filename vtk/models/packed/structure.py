"""Structure of timm's blocks for a packed pass: branches of a norm, a body and a scale, and the heads of an attention.

Block, ParallelThingsBlock, EvaBlock, BEiT's Block and RelPosBlock differ in names only. So do their attentions: one
matrix for q, k and v or three, with biases in it or beside it. Here each has one form, in timm's names.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import timm.models.beit as beit
import timm.models.eva as eva
import timm.models.vision_transformer as vit
import timm.models.vision_transformer_relpos as relpos
import torch
from timm.layers import Attention, AttentionRope, GluMlp, Mlp, RmsNorm, SwiGLU
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.transforms.context_broadcast import ContextBroadcast, own_class
from vtk.models.transforms.extra_block import SublayerBlock

RMS_NORMS = (RmsNorm, nn.RMSNorm)
_NORMS = (nn.LayerNorm, *RMS_NORMS)
_WIDE = ("RmsNormFp32",)
"""timm's RMSNorm that computes in fp32; the one of LayerNorm is a subclass of it."""
_FFNS = (Mlp, GluMlp, SwiGLU)
_BLOCKS = (vit.Block, eva.EvaBlock, beit.Block, relpos.RelPosBlock)
_ATTENTIONS = (Attention, AttentionRope, eva.EvaAttention, beit.Attention, relpos.RelPosAttention)
# modules with classes that act on single rows; Identity is in the second
_ACTIVATIONS = ("torch.nn.modules.activation", "torch.nn.modules.linear", "timm.layers.activations")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
"""Names of queries, keys and values, where each has a matrix of its own."""
MATRICES = ("qkv.weight", "proj.weight", "gate.weight")
"""Names of the matrices of `own_weights`."""
_POSITIONS = ("relative_position_bias_table", "rel_pos.")
_BIASES = ("q_bias", "v_bias")


@dataclass(frozen=True)
class Branch:
    """One summand of a block: scale(body(norm(x))).

    Attributes:
        name: of the body in the model.
        norm_name: of the norm.
        norm: before the body.
        body: attention or FFN.
        scale: LayerScale, or the identity.
    """

    name: str
    norm_name: str
    norm: Any
    body: Any
    scale: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class BlockStructure:
    """A block: x + Σ attentions, then x + Σ FFNs.

    Attributes:
        attns, ffns: the branches, one or more of each; a block of one branch has none of the other kind.
        after_attns, after_ffns: Context Broadcasting of the sum, of a block of parallel branches.
    """

    attns: tuple[Branch, ...]
    ffns: tuple[Branch, ...]
    after_attns: ContextBroadcast | None = None
    after_ffns: ContextBroadcast | None = None


@dataclass(frozen=True)
class Heads:
    """Heads of an attention.

    Attributes:
        count: H, of queries.
        kv: of keys and values; each serves H / kv heads of queries.
        dim: D.
        rotate_half: which channels of a head rotary embedding turns together: i and i + D/2, else 2i and 2i + 1.
        q_norm, k_norm: of the channels of a head, or the identity.
        inner: norm of the heads' outputs side by side, or the identity.
        gated: whether a product of the input, by the logistic function, multiplies the output.
    """

    count: int
    kv: int
    dim: int
    rotate_half: bool
    q_norm: Any
    k_norm: Any
    inner: Any
    gated: bool

    @property
    def widths(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values."""
        return self.count * self.dim, self.kv * self.dim, self.kv * self.dim

    @classmethod
    def of(cls, attn: Any) -> "Heads":
        """Read an attention of timm."""
        count = attn.num_heads
        rows = (attn.q_proj if attn.qkv is None else attn.qkv).weight.shape[0]
        blank = nn.Identity()
        return cls(
            count, getattr(attn, "num_kv_heads", count), rows // (count if attn.qkv is None else 3 * count),
            bool(getattr(attn, "rotate_half", False)), getattr(attn, "q_norm", blank), getattr(attn, "k_norm", blank),
            getattr(attn, "norm", blank), getattr(attn, "gate", None) is not None,
        )  # fmt: skip


def read_block(block: Any, name: str = "block") -> BlockStructure:
    """Return the structure of a block.

    Raises:
        UsageError: an unsupported block.
    """
    if type(block) in _BLOCKS:
        attn = Branch(f"{name}.attn", f"{name}.norm1", block.norm1, block.attn, _scale(block, "1"))
        ffn = Branch(f"{name}.mlp", f"{name}.norm2", block.norm2, block.mlp, _scale(block, "2"))
        return BlockStructure((attn,), (ffn,))
    if isinstance(block, vit.ParallelThingsBlock):
        return BlockStructure(
            _branches(block.attns, f"{name}.attns", "attn"), _branches(block.ffns, f"{name}.ffns", "mlp"),
            getattr(block, "cb_msa", None), getattr(block, "cb", None),
        )  # fmt: skip
    if type(block) is SublayerBlock:
        branch = Branch(f"{name}.{block.leaf}", f"{name}.norm", block.norm, getattr(block, block.leaf), block.ls)
        return BlockStructure((branch,), ()) if block.leaf == "attn" else BlockStructure((), (branch,))
    known = "Block, ParallelThingsBlock, EvaBlock and RelPosBlock"
    reason = ""
    if "Post" in type(block).__name__:
        reason = "its norms come after attention and FFN; "
    elif hasattr(block, "in_proj"):
        reason = "one matrix holds rows of attention, which are the task's, and of the FFN; "
    raise _refusal(name, block, f"{reason}only timm's {known} can be packed")


def attention_modules(blocks: Iterable[nn.Module]) -> list[tuple[str, Any]]:
    """Return the attention modules of timm's blocks with their names, in the order in which `packed_forward` runs them.

    Raises:
        UsageError: names an unsupported block, attention, norm or FFN.
    """
    structures = [read_block(block, f"blocks.{i}") for i, block in enumerate(blocks)]
    for structure in structures:
        for branch in structure.attns:
            _check_attention(branch)
        for branch in structure.ffns:
            _check_ffn(branch)
    return [(branch.name, branch.body) for structure in structures for branch in structure.attns]


def own_parameters(attn: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of an attention module that belong to the task: all except Context Broadcasting's Λ."""
    return {name: p for name, p in attn.named_parameters() if not name.startswith("cb.")}


def own_weights(attn: Any) -> dict[str, Tensor]:
    """Return a task's weights of an attention in the form of `packed_forward`, differentiable.

    Returns:
        ``qkv.weight`` ((H + 2·kv)·D, C) and ``qkv.bias``, one matrix whatever the module has; ``proj``, and where there
        are such ``q_norm``, ``k_norm``, ``norm`` and ``gate``, under these names. Tables of relative positions are not
        among them.
    """
    own: dict[str, Tensor] = dict(own_parameters(attn))
    found = small_weights(own, Heads.of(attn))
    found |= {key: t for key, t in own.items() if key in MATRICES}
    if attn.qkv is None:
        found["qkv.weight"] = torch.cat([own[f"{p}.weight"] for p in PROJECTIONS])
    return found


def small_weights(own: Mapping[str, Tensor], heads: Heads) -> dict[str, Tensor]:
    """Return the entries of `own_weights` that are no matrices: biases, and the norms of an attention.

    Args:
        own: `own_parameters`; matrices among them are not read.
        heads: of the attention.
    """
    found = {
        key: t for key, t in own.items()
        if key not in MATRICES and not key.startswith((*_POSITIONS, *_BIASES, *(f"{p}." for p in PROJECTIONS)))
    }  # fmt: skip
    sides = [own.get(f"{p}.bias", own.get(f"{p[0]}_bias")) for p in PROJECTIONS]
    like = next((t for t in sides if t is not None), None)
    if like is not None:  # EVA's and BEiT's keys have none
        filled = [like.new_zeros(n) if t is None else t for t, n in zip(sides, heads.widths, strict=True)]
        found["qkv.bias"] = torch.cat(filled)
    return found


def is_rms(norm: nn.Module) -> bool:
    """Return whether a norm is an RMSNorm."""
    return isinstance(norm, RMS_NORMS) or type(norm).__name__ in _WIDE


def _branches(parents: Iterable[Any], name: str, body: str) -> tuple[Branch, ...]:
    return tuple(
        Branch(f"{name}.{j}.{body}", f"{name}.{j}.norm", parent.norm, getattr(parent, body), parent.ls)
        for j, parent in enumerate(parents)
    )


def _scale(block: Any, which: str) -> Callable[[Tensor], Tensor]:
    if hasattr(block, f"ls{which}"):
        layer: Callable[[Tensor], Tensor] = getattr(block, f"ls{which}")
        return layer
    gamma: Tensor | None = getattr(block, f"gamma_{which}")
    return (lambda y: y) if gamma is None else lambda y: y * gamma


def _check_attention(branch: Branch) -> None:
    attn = branch.body
    # not a subclass, which may compute something else
    if own_class(attn) not in _ATTENTIONS:
        known = "Attention, AttentionRope, EvaAttention and those with relative positions"
        reason = "differential attention; " if "Diff" in type(attn).__name__ else ""
        raise _refusal(branch.name, attn, f"{reason}only timm's {known} can be packed")
    _check_norm(branch.norm_name, branch.norm)
    heads = Heads.of(attn)
    for name, norm in (("q_norm", heads.q_norm), ("k_norm", heads.k_norm), ("norm", heads.inner)):
        _check_norm(f"{branch.name}.{name}", norm)


def _check_ffn(branch: Branch) -> None:
    mlp = branch.body
    if own_class(mlp) not in _FFNS:
        raise _refusal(branch.name, mlp, "only timm's Mlp, GluMlp and SwiGLU act on single tokens")
    if not type(mlp.act).__module__.startswith(_ACTIVATIONS):
        raise _refusal(f"{branch.name}.act", mlp.act, "only torch's and timm's activations can be packed")
    _check_norm(branch.norm_name, branch.norm)
    _check_norm(f"{branch.name}.norm", mlp.norm)


def _check_norm(name: str, norm: nn.Module) -> None:
    if type(norm) is not nn.Identity and not isinstance(norm, _NORMS) and not is_rms(norm):
        raise _refusal(name, norm, "only LayerNorm and RMSNorm can be packed")


def _refusal(name: str, module: nn.Module, reason: str) -> UsageError:
    return UsageError(f"`{name}` is a {type(module).__name__}: {reason}; serve this model separately")
