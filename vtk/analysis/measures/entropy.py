"""Entropy of attention, layer by layer (Hyeon-Woo et al. 2023, Figures 4 and 7a)."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vtk.analysis.measures.results import LayerResults
from vtk.analysis.probes.attention_maps import unseen
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.token_positions import Places, has_class_token, watch_places
from vtk.errors import UsageError


@dataclass(frozen=True)
class LayerEntropy:
    """Entropy of one attention layer, in nats.

    Attributes:
        name: of the module.
        mean: over images, heads and queries.
        percentile15: below which 15 % of the values of all images, heads and queries are.
        cls: mean over images and heads of the class token's; None where a layer has none, or it is not known to.
        maximum: ln of the number of keys, that of uniform attention.
        heads: number of heads; those that do not attend (`vtk.models.transforms.uniform_heads`) do not count.
        keys: number of keys.
    """

    name: str
    mean: float
    percentile15: float
    cls: float | None
    maximum: float
    heads: int
    keys: int


@dataclass(frozen=True)
class AttentionEntropy(LayerResults[LayerEntropy]):
    """Entropy of every attention layer of a model.

    Attributes:
        unseen: modules that look like attention but whose weights could not be observed.
    """

    unseen: tuple[str, ...]


@torch.no_grad()
def attention_entropy(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> AttentionEntropy:
    """Return the entropy −Σ p ln p of every layer's attention, the model in eval mode.

    Memory: the attention of one layer and batch at a time, about three times over, and 4 bytes for each query of every
    image, head and layer.

    Args:
        model: fused attention too, parallel branches, windows.
        batches: images, labels unused.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no attention, or none whose weights can be observed.
        DataError: there are no images.
    """
    values: dict[str, list[Tensor]] = {}
    first: dict[str, list[Tensor]] = {}
    keys: dict[str, int] = {}
    with_class = has_class_token(model)

    def see(name: str, attention: Tensor, places: Places | None) -> None:
        entropy = entropies(attention).float().cpu()
        values.setdefault(name, []).append(entropy.flatten(2))
        keys[name] = attention.shape[-1]
        if with_class and places is not None and places.prefix and attention.shape[-1] == attention.shape[-2]:
            first.setdefault(name, []).append(entropy[..., 0])

    images = 0
    with eval_mode(model), watch_places(model, see):
        for batch, _ in stream(model, batches, max_images):
            model(batch)
            images += len(batch)
    hidden = unseen(model, set(values))
    if not values:
        why = f"its attention ({hidden[0]}) calls no softmax that can be seen" if hidden else "it has no attention"
        raise UsageError(f"{type(model).__name__}: {why}; entropy is of softmax attention, as in a ViT or Swin")
    layers = []
    for name, parts in values.items():
        every = np.concatenate([part.flatten().numpy() for part in parts])
        mean, low = float(every.mean(dtype=np.float64)), float(np.percentile(every, 15))
        cls = float(torch.cat(first[name]).double().mean()) if name in first else None
        layers.append(LayerEntropy(name, mean, low, cls, math.log(keys[name]), parts[0].shape[1], keys[name]))
    return AttentionEntropy(tuple(layers), images, hidden)


def entropies(attention: Tensor) -> Tensor:
    """Return −Σ p ln p over the last dimension, in nats; 0·ln 0 is 0."""
    return torch.special.entr(attention).sum(dim=-1)
