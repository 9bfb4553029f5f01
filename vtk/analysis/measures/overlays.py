"""Attention of the last layer as a map over the patches of an image."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.analysis.probes.attention_maps import unseen
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.token_positions import Places, has_class_token, watch_places
from vtk.errors import UsageError

_DIGITS = 3
Grid = list[list[float]]


@dataclass(frozen=True)
class AttentionMap:
    """Attention to the patches of one image.

    Attributes:
        mean: mean over heads, (height, width) of the grid, fp32; weights as they are, so that they sum to ``patches``.
        heads: of each head, (H, height, width), without those that do not attend (`uniform_heads`);
            (0, height, width) if heads are not separate.
        patches: share of the attention that goes to patches; the rest goes to class and register tokens.
        half: smallest share of the patches on which half of ``mean`` lies: 0.5 for a uniform map.
    """

    mean: Tensor
    heads: Tensor
    patches: float
    half: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: maps row by row, rounded to three digits."""
        return {
            "map": rounded_rows(self.mean),
            "heads": [rounded_rows(head) for head in self.heads],
            "patches": self.patches,
            "half": self.half,
        }


@dataclass(frozen=True)
class AttentionMaps:
    """Maps of several images.

    Attributes:
        layer: name of the layer, or ``all layers``.
        query: ``class token``, ``mean of all queries``, or the single query of a pooling layer.
        maps: of each image.
    """

    layer: str
    query: str
    maps: tuple[AttentionMap, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"layer": self.layer, "query": self.query, "images": [one.to_dict() for one in self.maps]}


@torch.no_grad()
def attention_maps(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> AttentionMaps:
    """Return the attention of the class token in the last layer, for each image, the model in eval mode.

    A layer with one query (attention pooling, CaiT's class attention) gives the attention of that query. A model
    without class token gives the mean over the queries of all patches; in windows, over those of each patch's own
    window.

    Memory: the attention of one layer and batch at a time, and of every image one map for each head.

    Args:
        model: fused attention too. Of parallel branches the last one of the last block.
        batches: images, labels unused.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no attention, none whose weights can be observed, or the places of its last are not
            known.
        DataError: there are no images.
    """
    kept: dict[str, Tensor | None] = {}
    query = ""

    def see(name: str, attention: Tensor, places: Places | None) -> None:
        nonlocal query
        kept.clear()  # only the last layer's is wanted
        kept[name] = None
        if places is not None:
            rows, query = query_attention(attention, places, has_class_token(model))
            kept[name] = places.assemble(rows[..., places.prefix :]).cpu()

    parts: list[Tensor] = []
    layer = ""
    with eval_mode(model), watch_places(model, see):
        for batch, _ in stream(model, batches, max_images):
            model(batch)
            if not kept:
                hidden = unseen(model, set())
                why = f"its attention ({hidden[0]}) can not be seen" if hidden else "it has no attention"
                raise UsageError(f"{type(model).__name__}: {why}; overlays show that of a ViT, Swin or the like")
            ((layer, attention_rows),) = kept.items()
            if attention_rows is None:
                raise UsageError(
                    f"{type(model).__name__}: the positions of the tokens of its last attention ({layer}) are not "
                    "known; overlays need patches, as in a ViT or Swin"
                )
            parts.append(attention_rows)
    return AttentionMaps(layer, query, tuple(of_heads(one) for part in parts for one in part))


def query_attention(attention: Tensor, places: Places, class_token: bool) -> tuple[Tensor, str]:
    """Return the attention of the query (B·windows, H, keys), and a name for the query.

    Args:
        attention: (B·windows, H, queries, keys).
        places: of its keys.
        class_token: whether the model has one; it is the first key where there are prefix tokens.
    """
    if attention.shape[-2] == 1:
        return attention[:, :, 0], "class token" if class_token and places.prefix else "single query"
    if class_token and places.prefix:
        return attention[:, :, 0], "class token"
    return attention[:, :, places.prefix :].mean(dim=2), "mean of all queries"


def of_heads(heads: Tensor) -> AttentionMap:
    """Return the map of an image from those of its heads (H, height, width)."""
    mean = heads.float().mean(dim=0)
    return AttentionMap(mean, heads.float(), float(mean.sum(dtype=torch.float64)), half_share(mean))


def half_share(weights: Tensor) -> float:
    """Return the smallest share of positions that holds half of the weight, 0 to 0.5, interpolated linearly.

    All weight on one of n places gives 0.5/n, uniform weights 0.5; NaN of weights that sum to 0.
    """
    down = weights.flatten().double().sort(descending=True).values
    sums = down.cumsum(0) / down.sum()
    before = int((sums < 0.5).sum())  # places that are needed whole
    reached = float(sums[before - 1]) if before else 0.0
    return (before + (0.5 - reached) / float(sums[before] - reached)) / len(down)


def rounded_rows(values: Tensor) -> Grid:
    """Return a map (height, width) as lists, three digits of each value."""
    return [[float(f"{value:.{_DIGITS}g}") for value in row] for row in values.tolist()]
