"""Norms of weights, tokens and hidden activations (Chen et al. 2022, Table 4 and section 4.4)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.activations import Hidden, Kind, watch_activations
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.depth_points import depth_points, watch_points
from vtk.analysis.probes.parameter_groups import parameter_blocks
from vtk.analysis.probes.token_positions import has_class_token, prefix_tokens
from vtk.errors import NoResultError
from vtk.models.task_parameters import head_names

OUTLIER = 4.0
"""A token with more than this many times the median norm of its image is an outlier: ordinary tokens stay well within,
and the artefacts of large ViTs without register tokens are about ten times as large (Darcet et al., 2024)."""

_PARTS = ("msa", "token mlp", "mlp")


@dataclass(frozen=True)
class WeightNorm:
    """Norm of a group of parameters.

    Attributes:
        norm: root of the sum of the squares of all of them, ‖w‖₂ of Chen et al. (2022).
        matrices: the same of those with two dimensions or more, the Frobenius norm. Biases, norms and scales are not
            in it: attention's key bias, which softmax cancels, can outweigh all else.
        parameters: how many numbers these are.
    """

    norm: float
    matrices: float
    parameters: int


@dataclass(frozen=True)
class TokenNorm:
    """Norms of the tokens at one point.

    Attributes:
        name: ``stem``, ``pos_embed`` or the name of a block.
        mean: over images and positions, class and register tokens apart.
        cls: mean over images of the class token's; None where there is none.
        maximum: largest of any position of any image.
        outliers: share of the positions whose norm is over `OUTLIER` times the median of their image.
    """

    name: str
    mean: float
    cls: float | None
    maximum: float
    outliers: float


@dataclass(frozen=True)
class HiddenNorm:
    """Norm of a hidden layer, after its activation: Chen et al.'s ‖a‖₂, root mean square over images.

    The paper does not define the norm; here it is over all positions and neurons of an image.

    Attributes:
        name: of the activation's module.
        block: number of its block, from 1.
        kind: ``MLP``, ``token MLP`` or ``conv``.
        norm: √(Σ a² / images).
    """

    name: str
    block: int
    kind: Kind
    norm: float


@dataclass(frozen=True)
class Norms(MeasureResult):
    """Norms of a model.

    Attributes:
        weights: of `parameter_blocks`, of ``head``, and of the parts of each block: ``block 1: msa``, ``block 1: mlp``.
        tokens: of each point, by depth.
        hidden: of each hidden layer that can be seen.
        images: number of images.
        prefix: number of class and register tokens.
    """

    weights: dict[str, WeightNorm]
    tokens: tuple[TokenNorm, ...]
    hidden: tuple[HiddenNorm, ...]
    images: int
    prefix: int


def weight_norms(model: nn.Module) -> dict[str, WeightNorm]:
    """Return the norms of a model's parameters by group, summed in fp64; see `Norms`."""
    named = dict(model.named_parameters())
    squares = {name: float(p.detach().double().square().sum()) for name, p in named.items()}
    groups: dict[str, set[str]] = {name: set(group) for name, group in parameter_blocks(model).items()}
    if head := head_names(model, squares):
        groups["head"] = set(head)
    for name in [name for name in groups if name.startswith("block ")]:
        groups |= {f"{name}: {part}": own for part in _PARTS if (own := groups[name] & groups.get(part, set()))}
    norms = {}
    for group, names in groups.items():
        matrices = sum(squares[name] for name in names if named[name].ndim > 1)
        count = sum(named[name].numel() for name in names)
        norms[group] = WeightNorm(sum(squares[name] for name in names) ** 0.5, matrices**0.5, count)
    return norms


@torch.no_grad()
def model_norms(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> Norms:
    """Return the norms of a model's weights, tokens and hidden layers, the model in eval mode.

    Memory: the norms of one point's tokens and one batch; three numbers for each point and layer are kept.

    Args:
        model: with blocks that are known: a timm ViT, Swin, PiT, Mixer, ResNet.
        batches: images, labels unused.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no recognised blocks.
        DataError: there are no images.
        NoResultError: the model's activations are not finite.
    """
    prefix = prefix_tokens(model)
    has_cls = has_class_token(model)
    points = depth_points(model)
    totals: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    largest: dict[str, float] = {}
    squares: dict[Hidden, float] = {}
    positions = [-1]  # of the stem: as many tokens later are these, without a class token (CaiT's come last)

    def see(name: str, tokens: Tensor) -> None:
        every = torch.linalg.vector_norm(tokens.double(), dim=-1)
        if name == "stem":
            positions.append(every.shape[1])
        ahead = prefix if every.shape[1] > prefix and every.shape[1] != positions[-1] else 0
        patches = every[:, ahead:]
        middle = patches.median(dim=1, keepdim=True).values
        outliers = ((patches > OUTLIER * middle) & (middle > 0)).sum()
        cls = every[:, 0].sum() if ahead and has_cls else torch.full_like(patches.sum(), torch.nan)
        totals[name] = totals.get(name, 0) + torch.stack((patches.sum(), cls, outliers))
        counts[name] = counts.get(name, 0) + patches.numel()
        largest[name] = max(largest.get(name, 0.0), float(patches.max()))

    def see_hidden(hidden: Hidden, output: Tensor) -> None:
        squares[hidden] = squares.get(hidden, 0.0) + float(output.double().square().sum())

    images = 0
    with eval_mode(model), watch_points(points, see), watch_activations(model, see_hidden):
        for batch, _ in stream(model, batches, max_images):
            model(batch)
            images += len(batch)
    tokens = []
    for point in points:
        if point.name not in totals:
            continue
        total, cls, outliers = totals[point.name].tolist()
        if not math.isfinite(total):
            raise NoResultError(f"the tokens after `{point.name}` are not all finite; their norms cannot be given")
        of = counts[point.name]
        mean_cls = None if cls != cls else cls / images
        tokens.append(TokenNorm(point.name, total / of, mean_cls, largest[point.name], outliers / of))
    hidden = tuple(HiddenNorm(h.name, h.block, h.kind, (value / images) ** 0.5) for h, value in squares.items())
    return Norms(weight_norms(model), tuple(tokens), hidden, images, prefix)
