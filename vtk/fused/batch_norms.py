"""BatchNorm of stems and FFNs, folded into the layer before it: in eval mode it is a scale and a shift per channel.

With s = weight ÷ √(variance + eps), BN(Wx + b) = (s·W)x + s·(b − mean) + shift. Only what is known to run in this order
is folded: a plain Sequential, and those of timm's modules of which that is known.
"""

import itertools
from typing import Any

import torch
from timm.layers import BatchNormAct2d, ConvNormAct
from timm.models import resnet
from timm.models._features import FeatureListNet
from timm.models.levit import ConvNorm
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from vtk.models.transforms.mlp_layers import TokenBatchNormAct

_PLAIN = (nn.BatchNorm2d, nn.SyncBatchNorm)
_PAIRS: dict[type[nn.Module], tuple[tuple[str, str], ...]] = {
    ConvNorm: (("linear", "bn"),),
    ConvNormAct: (("conv", "bn"),),
    resnet.BasicBlock: (("conv1", "bn1"), ("conv2", "bn2")),
    resnet.Bottleneck: (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3")),
}
"""Modules in which one part feeds another and nothing else."""


def fold_batch_norms(module: nn.Module) -> nn.Module:
    """Fold every BatchNorm that follows a convolution into it, in place; what stays of it is its activation, if any.

    Args:
        module: in eval mode: a stem, such as a chain of convolution, BatchNorm and activation.
    """
    for child in module.children():
        fold_batch_norms(child)
    for before, after in _pairs(module):
        norm = getattr(module, after)
        owner, name = _last(module, before)
        conv: Any = getattr(owner, name)
        known = type(norm) in _PLAIN or type(norm) is BatchNormAct2d
        if type(conv) is nn.Conv2d and known and norm.track_running_stats:
            setattr(owner, name, fuse_conv_bn_eval(conv, norm).requires_grad_(False))
            rest = nn.Sequential(norm.drop, norm.act) if type(norm) is BatchNormAct2d else nn.Identity()
            setattr(module, after, rest.eval())
    return module


def fold_token_norm(act: nn.Module, weight: Tensor, bias: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
    """Fold the BatchNorm between an FFN's first layer and its activation, where it has one.

    Args:
        act: what follows the layer.
        weight: of the layer (hidden, C).
        bias: of the layer (hidden).

    Returns:
        The activation, weight and bias without it.
    """
    if type(act) is not TokenBatchNormAct:
        return act, weight, bias
    bn = act.bn
    assert bn.running_mean is not None and bn.running_var is not None
    scale = bn.weight.detach().to(weight.dtype) * torch.rsqrt(bn.running_var.to(weight.dtype) + bn.eps)
    shift = (bias - bn.running_mean.to(weight.dtype)) * scale + bn.bias.detach().to(weight.dtype)
    return act.act, weight * scale[:, None], shift


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """Return names of parts of which the first feeds the second and nothing else."""
    kind = type(module)
    if kind in _PAIRS:
        return list(_PAIRS[kind])
    if kind not in (nn.Sequential, FeatureListNet):
        return []  # the order of its parts says nothing
    names = [name for name, part in module.named_children() if type(part) is not nn.Identity]
    seen = getattr(module, "return_layers", {})  # features from before a norm are another reader
    return [(a, b) for a, b in itertools.pairwise(names) if a not in seen]


def _last(owner: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return where the last part of nested Sequentials is: what holds it, and its name there."""
    part = getattr(owner, name)
    while type(part) is nn.Sequential and len(part):
        owner, name = part, list(part._modules)[-1]
        part = getattr(owner, name)
    return owner, name
