"""Mean attention distance by layer and head (Dosovitskiy et al. 2021; Hyeon-Woo et al. 2023, Figure 7b)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.analysis.measures.results import LayerResults
from vtk.analysis.probes.attention_maps import unseen
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.token_positions import Places, watch_places
from vtk.errors import UsageError


@dataclass(frozen=True)
class LayerDistance:
    """Attention distance of one layer, in image sides; see `attention_distance`.

    Attributes:
        name: of the module.
        mean: over images, heads and queries.
        heads: mean over images and queries of each head; those that do not attend (`uniform_heads`) are not
            among them.
        uniform: that of uniform attention over the same positions.
        relative: relative distance of Hyeon-Woo et al. (2023).
        prefix: share of the patches' attention that goes to class and register tokens.
        grid: height and width, in tokens, of what a query sees: the map, or its window.
        map: height and width of the map.
    """

    name: str
    mean: float
    heads: tuple[float, ...]
    uniform: float
    relative: float
    prefix: float
    grid: tuple[int, int]
    map: tuple[int, int]


@dataclass(frozen=True)
class AttentionDistance(LayerResults[LayerDistance]):
    """Attention distance of every attention layer of a model.

    Attributes:
        unplaced: layers whose tokens have unknown positions.
        unseen: modules that look like attention but whose weights could not be observed.
    """

    unplaced: tuple[str, ...]
    unseen: tuple[str, ...]


@torch.no_grad()
def attention_distance(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> AttentionDistance:
    """Return the mean distance between the queries of every layer and what they attend to, the model in eval mode.

    Places are centres of patches; one unit is the image's side, its height for rows and its width for columns, so that
    layers, windows and image sizes compare. A query's distance is Σⱼ aᵢⱼ‖pᵢ − pⱼ‖₂ / Σⱼ aᵢⱼ over the keys j that have
    a place, itself included: class and register tokens have none, so that they are left out as queries and as keys, and
    the rest is made to sum to 1. In windows (Swin, AlterNet) a query sees its window only, whose distances are measured
    in the same unit; a map that is padded to whole windows has places in its padding too.

    ``relative`` follows Hyeon-Woo et al. (2023): Σ_{j≠i} aᵢⱼ‖pᵢ − pⱼ‖₁, mean over queries, the attention as it is. The
    paper writes a mean over pairs (i, j), which is this divided by the number of other tokens and shrinks as an image
    gets more of them.

    Memory: the attention of one layer and batch at a time, about three times over.

    Args:
        model: fused attention too, parallel branches, windows.
        batches: images, labels unused.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no attention, none whose weights can be observed, or none whose tokens have known
            places.
        DataError: there are no images.
    """
    sums: dict[str, _Sums] = {}
    unplaced: dict[str, None] = {}

    def see(name: str, attention: Tensor, places: Places | None) -> None:
        if places is None or attention.shape[-1] != attention.shape[-2]:
            unplaced[name] = None
        else:
            sums.setdefault(name, _Sums(places, attention)).add(attention)

    images = 0
    with eval_mode(model), watch_places(model, see):
        for batch, _ in stream(model, batches, max_images):
            model(batch)
            images += len(batch)
    hidden = unseen(model, {*sums, *unplaced})
    if not sums:
        if unplaced:
            why = f"the places of the tokens of {next(iter(unplaced))} are not known"
        else:
            why = f"its attention ({hidden[0]}) calls no softmax that can be seen" if hidden else "it has no attention"
        raise UsageError(f"{type(model).__name__}: {why}; distance is of attention over patches, as in a ViT or Swin")
    layers = tuple(one.layer(name) for name, one in sums.items())
    return AttentionDistance(layers, images, tuple(unplaced), hidden)


class _Sums:
    """Distances of one layer's queries, added up over batches by head, in fp64."""

    def __init__(self, places: Places, attention: Tensor) -> None:
        self.places = places
        at = places.coordinates(attention.device).to(attention.dtype)
        self.euclid, self.city = torch.cdist(at, at, p=2.0), torch.cdist(at, at, p=1.0)
        zeros = torch.zeros(attention.shape[1], dtype=torch.float64, device=attention.device)
        self.distance, self.relative, self.weight = zeros.clone(), zeros.clone(), zeros.clone()
        self.queries = 0  # of each head
        self.looking = zeros.clone()  # those that attend to places at all

    def add(self, attention: Tensor) -> None:
        p = self.places.prefix
        patches = attention[..., p:, p:]
        weight = patches.sum(dim=-1)
        distance = (patches * self.euclid).sum(dim=-1) / weight
        looking = weight > 0
        self.distance += distance.where(looking, 0).sum(dim=(0, 2), dtype=torch.float64)
        self.looking += looking.sum(dim=(0, 2))
        self.relative += (patches * self.city).sum(dim=(0, 2, 3), dtype=torch.float64)
        self.weight += weight.sum(dim=(0, 2), dtype=torch.float64)
        self.queries += weight.shape[0] * weight.shape[2]

    def layer(self, name: str) -> LayerDistance:
        heads, count = len(self.distance), self.queries
        return LayerDistance(
            name=name,
            mean=float(self.distance.sum() / self.looking.sum()),
            heads=tuple((self.distance / self.looking).tolist()),
            uniform=float(self.euclid.mean(dtype=torch.float64)),
            relative=float(self.relative.sum() / (heads * count)),
            prefix=max(0.0, 1 - float(self.weight.sum() / (heads * count))),
            grid=self.places.grid,
            map=self.places.map,
        )
