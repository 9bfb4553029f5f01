"""Attention rollout: attention to the class token through all layers (Abnar and Zuidema 2020)."""

import re

import torch
from torch import Tensor, nn

from vtk.analysis.measures.overlays import AttentionMap, AttentionMaps, half_share, query_attention
from vtk.analysis.probes.attention_maps import unseen
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.token_positions import Places, has_class_token, watch_places
from vtk.errors import UsageError
from vtk.models.transforms.uniform_heads import UniformHeadAttention

_BRANCH = re.compile(r"(.+)\.attns\.\d+\.\w+")


@torch.no_grad()
def attention_rollout(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> AttentionMaps:
    """Return the attention rollout from every patch to the class token, for each image, the model in eval mode.

    With Āₗ the mean over the heads of layer l, rollout is Π (½Āₗ + ½I), the last layer to the left: half of a token is
    the skip connection's. Heads of uniform attention (`uniform_heads`) count as such. Parallel branches of a
    block attend to the same tokens: Āₗ is their mean. FFNs, LayerScale and Context Broadcasting have no part in it. A
    model without class token gives the mean over all patches.

    Memory: the attention of one layer and batch at a time, and of each image of a batch two (N, N) matrices.

    Args:
        model: whose layers all see all tokens, and all the same ones: ViT, DeiT, DINOv2, BEiT, EVA, parallel blocks.
        batches: images, labels unused.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no attention, or some that is in windows, over another number of tokens, of two kinds
            in one layer, or not seen.
        DataError: there are no images.
    """
    parts: list[Tensor] = []
    maps: list[AttentionMap] = []
    query = ""
    with eval_mode(model):
        for batch, _ in stream(model, batches, max_images):
            rolled = _Rollout(model)
            with watch_places(model, rolled.see):
                model(batch)
            rows, query = rolled.finish()
            parts.append(rows)
    for part in parts:
        for one in part:
            share = float(one.sum(dtype=torch.float64))
            maps.append(AttentionMap(one, one.new_empty(0, *one.shape), share, half_share(one)))
    return AttentionMaps("all layers", query, tuple(maps))


class _Rollout:
    """The product of attention matrices of one batch, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.kind = model, type(model).__name__
        self.rolled: Tensor | None = None
        self.places: Places | None = None
        self.seen: set[str] = set()
        self.block, self.branches, self.sum = "", 0, torch.empty(0)

    def see(self, name: str, attention: Tensor, places: Places | None) -> None:
        if places is None or attention.shape[-2] != attention.shape[-1]:
            raise self._refusal(f"{name} does not attend from all tokens of a grid of patches to all of them")
        if places.grid != places.map:
            height, width = places.grid
            raise self._refusal(f"{name} sees windows of {height}×{width} tokens")
        if self.places is not None and places != self.places:
            before = self.places.prefix + self.places.grid[0] * self.places.grid[1]
            raise self._refusal(f"{name} has {attention.shape[-1]} tokens, the layers before it {before}")
        if name in self.seen:
            raise self._refusal(f"{name} attends more than once")
        self.places = places
        self.seen.add(name)
        mean = over_heads(self.model.get_submodule(name), attention)
        branch = _BRANCH.fullmatch(name)
        block = branch[1] if branch else name
        if block != self.block:
            self._close()
            self.block, self.branches, self.sum = block, 1, mean
        else:
            self.branches, self.sum = self.branches + 1, self.sum + mean

    def _close(self) -> None:
        """Multiply the layer that is complete to the left of those before it."""
        if self.branches:
            self.rolled = step(self.sum / self.branches, self.rolled)
        self.branches = 0

    def finish(self) -> tuple[Tensor, str]:
        """Return the maps (B, height, width) and the name of their query."""
        self._close()
        hidden = unseen(self.model, self.seen)
        if hidden:
            raise self._refusal(f"its attention ({hidden[0]}) calls no softmax that can be seen")
        if self.rolled is None or self.places is None:
            raise self._refusal("it has no attention")
        rows, query = query_attention(self.rolled[:, None], self.places, has_class_token(self.model))
        return self.places.assemble(rows[:, 0, self.places.prefix :]).float().cpu(), query

    def _refusal(self, why: str) -> UsageError:
        return UsageError(f"{self.kind}: {why}; rollout is of models whose layers all see all tokens, as in a ViT")


def over_heads(module: nn.Module, attention: Tensor) -> Tensor:
    """Return the mean over heads (B, N, N) of a layer's attention, uniform heads of the module included."""
    mean = attention.mean(dim=1)
    if not isinstance(module, UniformHeadAttention):
        return mean
    n = mean.shape[-1]
    uniform = torch.full_like(mean[0], 1 / n)
    if module.uniform_mix == "cb":
        uniform = 0.5 * (uniform + torch.eye(n, dtype=mean.dtype, device=mean.device))
    share = module.learned_heads / module.num_heads
    return share * mean + (1 - share) * uniform


def step(mean: Tensor, before: Tensor | None) -> Tensor:
    """Return (½Ā + ½I) times the rollout of the layers before, all (B, N, N)."""
    n = mean.shape[-1]
    mixed = 0.5 * mean + 0.5 * torch.eye(n, dtype=mean.dtype, device=mean.device)
    return mixed if before is None else mixed @ before
