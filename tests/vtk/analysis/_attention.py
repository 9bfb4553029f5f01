"""Models whose attention is given, and what timm's unfused attention is, for the tests of where models look."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import nn

from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostics.base import Context
from vtk.card import InputSpec


class GivenAttention(nn.Module):
    """Attends with a given matrix (H, N, N), whatever it gets."""

    def __init__(self, matrix):
        super().__init__()
        self.num_heads = len(matrix)
        self.qkv = nn.Linear(1, 1)
        self.register_buffer("logits", matrix.log())  # of 0 it is -inf, whose softmax is 0 exactly

    def forward(self, x):
        weights = self.logits.expand(len(x), -1, -1, -1).softmax(dim=-1)
        return x + (weights.mean(dim=1) @ x)


class GivenViT(nn.Module):
    """A model of a grid of patches, after a class token or not, whose layers attend as they are told."""

    def __init__(self, grid, matrices, *, class_token=True):
        super().__init__()
        self.patch_embed = SimpleNamespace(grid_size=grid)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 1)) if class_token else None
        self.num_prefix_tokens = int(class_token)
        self.tokens = grid[0] * grid[1] + int(class_token)
        self.blocks = nn.Sequential(*map(GivenAttention, matrices))
        self.head = nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.blocks(x.mean() + torch.ones(len(x), self.tokens, 1, dtype=x.dtype)))


@contextmanager
def fused(model, on) -> Iterator[None]:
    """Switch timm's fused attention for a while."""
    before = {module: module.fused_attn for module in model.modules() if hasattr(module, "fused_attn")}
    for module in before:
        module.fused_attn = on
    yield
    for module, value in before.items():
        module.fused_attn = value


def unfused_attention(model, x):
    """By hand: timm's attention (B, H, N, N) by layer, as its dropout module gets it with fusion off, in fp64."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if hasattr(module, "fused_attn"):
            hook = lambda m, args, name=name: seen.__setitem__(name, args[0].detach().double())  # noqa: E731
            handles.append(module.attn_drop.register_forward_pre_hook(hook))
    with torch.no_grad(), fused(model, False):
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def random_attention(heads, tokens, seed=0):
    """A matrix (H, N, N) of which every row sums to 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, tokens, tokens, generator=generator).mul(2).softmax(dim=-1)


def context(model, batches, *, side, overlay_images=8, mean=(0.5,), std=(0.5,)):
    """What `vtk analyze` hands to a diagnostic."""
    channels = batches[0][0].shape[1]
    spec = InputSpec(side, side, channels, mean * channels, std * channels)
    return Context(
        model=model, spec=spec, classes=None, multi_label=False, device=torch.device("cpu"),
        config=AnalyzeConfig(overlay_images=overlay_images), loader=lambda size: batches,
        augmented=lambda size: batches, count=sum(len(x) for x, _ in batches),
    )  # fmt: skip
