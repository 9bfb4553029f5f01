"""The transform ``add_block``: one more attention or FFN at the end of a Vision Transformer (Hyeon-Woo et al. 2023).

Their Figure 3 adds either "at the last layer" of a ViT of eight blocks, with nearly the same number of weights, and
does not say how. Here it is a residual branch after the last block, x + LayerScale(f(norm(x))), with a norm of its own:
an attention with the heads of the model, 4C² + 4C weights, or an FFN of hidden width 2C, 4C² + 3C. A usual FFN of
width 4C would have twice as many.
"""

from typing import Any, Literal, get_args

import timm.models.vision_transformer as vit
from timm.layers import Attention, DropPath, LayerScale, Mlp
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.initialization.draw import reset
from vtk.models.structure import EXAMPLES
from vtk.models.transforms.registry import register

Kind = Literal["msa", "mlp"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RATIO = 2
"""Hidden width of the FFN over C, for which both kinds have nearly the same number of weights."""


class SublayerBlock(nn.Module):
    """A block of one residual branch, x + drop_path(ls(body(norm(x)))).

    Args:
        norm: before the branch.
        body: timm's `Attention` or `Mlp`, kept as ``attn`` or ``mlp``.
        ls: LayerScale, or the identity.
        drop_path: stochastic depth, or the identity.

    Attributes:
        leaf: name of the body: ``attn`` or ``mlp``.
    """

    def __init__(self, norm: nn.Module, body: nn.Module, ls: nn.Module, drop_path: nn.Module) -> None:
        super().__init__()
        self.leaf = "attn" if isinstance(body, Attention) else "mlp"
        self.norm = norm
        self.add_module(self.leaf, body)
        self.ls = ls
        self.drop_path = drop_path

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C); an FFN ignores the mask."""
        body: Any = getattr(self, self.leaf)
        options = {} if self.leaf == "mlp" else {"attn_mask": attn_mask, "is_causal": is_causal}
        y: Tensor = x + self.drop_path(self.ls(body(self.norm(x), **options)))
        return y


@register("add_block")
def add_block(model: nn.Module, *, kind: str) -> dict[str, str | None]:
    """Append a block of one attention or one FFN to a Vision Transformer, in place.

    Its norm, heads, LayerScale, dropouts and stochastic depth are like those of the last block; attention is plain,
    without Context Broadcasting, uniform heads or a neighbourhood. Linear layers are drawn as timm draws those of its
    Vision Transformers: a truncated normal distribution of deviation 0.02, and biases of 0.

    Args:
        model: a timm VisionTransformer of sequential or parallel blocks with timm's attention and plain FFN.
        kind: ``msa`` or ``mlp``.

    Returns:
        The map from the model's keys to themselves, None for the tensors of the block: ``blocks.12.norm.weight``, …

    Raises:
        UsageError: another kind of model or block, or one that has such a block; the model is unchanged.
    """
    if kind not in KINDS:
        raise UsageError(f"`--extra-block` is {kind}; allowed is {', '.join(KINDS)}")
    name = type(model).__name__
    if not isinstance(model, vit.VisionTransformer) or type(model.blocks) is not nn.Sequential:
        raise UsageError(f"`--extra-block` extends timm's VisionTransformer ({EXAMPLES}), not {name}")
    depth, before = len(model.blocks), set(model.state_dict())
    norm, attn, mlp, ls, drop_path = _parts(f"blocks.{depth - 1}", model.blocks[-1] if depth else None)
    weight = attn.proj.weight
    factory: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    dim, normed = weight.shape[0], type(norm)
    if kind == "msa":
        body: nn.Module = Attention(
            dim, dim // attn.head_dim, attn_head_dim=attn.head_dim, qkv_bias=attn.qkv.bias is not None,
            proj_bias=attn.proj.bias is not None, qk_norm=type(attn.q_norm) is not nn.Identity,
            attn_drop=attn.attn_drop.p, proj_drop=attn.proj_drop.p, norm_layer=normed, **factory,
        )  # fmt: skip
    else:
        act = getattr(mlp.act, "act", mlp.act)  # without the BatchNorm that `change_mlp` puts before it
        body = Mlp(
            dim, RATIO * dim, act_layer=type(act), bias=mlp.fc2.bias is not None, drop=mlp.drop1.p, **factory
        )  # fmt: skip
    scale: nn.Module = nn.Identity()
    if isinstance(ls, LayerScale):
        scale = LayerScale(dim, init_values=ls.init_values, **factory)
    rate = drop_path.drop_prob if isinstance(drop_path, DropPath) else 0.0
    new = SublayerBlock(normed(dim, **factory), body, scale, DropPath(rate) if rate else nn.Identity())
    if hasattr(norm, "eps"):
        new.norm.eps = norm.eps
    for layer in new.modules():
        if isinstance(layer, nn.Linear):
            reset(layer, "extra_block.linear")
    model.blocks.append(new.train(model.blocks[-1].training))
    model.feature_info = [*model.feature_info, {**model.feature_info[-1], "module": f"blocks.{depth}"}]
    return {key: key if key in before else None for key in model.state_dict()}


def _parts(where: str, block: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return norm, attention, FFN, LayerScale and stochastic depth of the last block."""
    if isinstance(block, SublayerBlock):
        raise UsageError(f"`--extra-block`: {where} is such a block already; it is added once")
    if isinstance(block, vit.ParallelThingsBlock):
        first = block.attns[0]
        found = first.norm, first.attn, block.ffns[0].mlp, first.ls, first.drop_path
    elif type(block) is vit.Block:
        found = block.norm1, block.attn, block.mlp, block.ls1, block.drop_path1
    else:
        what = type(block).__name__
        raise UsageError(f"`--extra-block`: {where} is a {what}; supported are timm's Block and ParallelThingsBlock")
    for part, kind in ((found[1], Attention), (found[2], Mlp)):
        if not isinstance(part, kind):
            raise UsageError(
                f"`--extra-block`: {where} has a {type(part).__name__}; only timm's {kind.__name__} can be added"
            )
    return found
