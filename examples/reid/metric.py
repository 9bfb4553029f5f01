"""The metric side of re-identification: batches of P identities, the triplet loss over them, and how it is judged."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.data.loading.samplers import EpochSampler, mix
from vtk.training.objectives.base import Batch


class PkSampler(EpochSampler):
    """Every batch holds K images of each of P identities; an epoch shows every image once.

    Args:
        labels: identity of each image; each identity has a multiple of K images, and P divides their number.
        people: P.
        each: K.
        seed: of the order.
    """

    def __init__(self, labels: Sequence[int], people: int, each: int, seed: int) -> None:
        super().__init__(len(labels), shuffle=True, seed=seed)
        self.people, self.each = people, each
        self.images = {label: [i for i, y in enumerate(labels) if y == label] for label in sorted(set(labels))}
        uneven = {len(images) for images in self.images.values()}
        if len(uneven) > 1 or uneven.pop() % each or len(self.images) % people:
            raise ValueError(f"{len(self.images)} identities do not go into batches of {people} × {each} images")

    def __iter__(self) -> Iterator[tuple[int, int]]:
        random = np.random.default_rng(mix(self.seed, self.epoch))
        shuffled = {label: random.permutation(images) for label, images in self.images.items()}
        rounds = len(next(iter(shuffled.values()))) // self.each
        for i in range(rounds):
            for label in random.permutation(list(shuffled)):
                for image in shuffled[label][i * self.each : (i + 1) * self.each]:
                    yield self.epoch, int(image)


def batch_hard(embedded: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Return the triplet loss with the farthest positive and the nearest negative of each anchor in the batch.

    Hermans et al., *In Defense of the Triplet Loss*, 2017, equation 5: max(0, margin + d(a, p) − d(a, n)).

    Args:
        embedded: (B, D).
        labels: (B,); every identity has two images or more, and there are two identities or more.
        margin: in units of the distance.
    """
    # not torch.cdist: the gradient of a distance of exactly 0 would not be a number
    off = (embedded[:, None] - embedded[None]).square().sum(2).clamp_min(1e-12).sqrt()
    same = labels[:, None] == labels[None]
    positive = off.masked_fill(~same, -torch.inf).amax(1)
    negative = off.masked_fill(same, torch.inf).amin(1)
    return (margin + positive - negative).clamp_min(0).mean()


class ReId(nn.Module):
    """A timm model whose classifier is the metric head, and what training needs besides: BNNeck and a classifier.

    The triplet loss sees the embedding before the BatchNorm, the identity loss the one after it (Luo et al., *Bag of
    Tricks*, 2019). Only the timm model is kept.
    """

    def __init__(self, model: nn.Module, width: int, people: int) -> None:
        super().__init__()
        self.model, self.neck = model, nn.BatchNorm1d(width)
        self.neck.bias.requires_grad_(False)
        self.classifier = nn.Linear(width, people, bias=False)
        nn.init.normal_(self.classifier.weight, std=0.01)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and identity logits."""
        embedded = self.model(images)
        return embedded, self.classifier(self.neck(embedded))


class ReIdObjective:
    """Triplet loss plus cross-entropy of the identities."""

    def __init__(self, margin: float = 0.3) -> None:
        self.margin = margin

    def start_epoch(self, seed: int) -> None:
        """Nothing is drawn here."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the sum of both, and each for the log."""
        embedded, logits = model(batch.images)
        triplet = batch_hard(embedded.float(), batch.labels, self.margin)
        identity = F.cross_entropy(logits.float(), batch.labels, label_smoothing=0.1)
        return triplet + identity, {"triplet": triplet.detach(), "identity": identity.detach()}


def rank(embedded: Tensor, people: Sequence[int], cameras: Sequence[int]) -> tuple[float, float]:
    """Return mAP and Rank-1: each image of camera 0 is a query among the images of all other cameras.

    An image of the query's own camera is never an answer (Zheng et al., *Market-1501*, 2015).
    """
    who, where = np.asarray(people), np.asarray(cameras)
    unit = F.normalize(embedded.double(), dim=1)
    likeness = (unit @ unit.T).numpy()
    precisions, first = [], []
    for query in np.nonzero(where == 0)[0]:
        gallery = np.nonzero(where != 0)[0]
        order = gallery[np.argsort(-likeness[query, gallery], kind="stable")]
        right = who[order] == who[query]
        hits = np.nonzero(right)[0]
        precisions.append(np.mean(np.arange(1, len(hits) + 1) / (hits + 1)))
        first.append(right[0])
    return float(np.mean(precisions)), float(np.mean(first))
