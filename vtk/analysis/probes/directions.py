"""Random directions in weight space, scaled to the norms of the weights."""

from typing import Literal

import torch
from torch import Tensor, nn

from vtk.errors import UsageError

DirectionMode = Literal["filter", "reference"]
MODES: tuple[DirectionMode, ...] = ("filter", "reference")
Direction = dict[str, Tensor]
"""Steps by parameter's name; a parameter that is not in it stays where it is."""

_POSITIONS = ("pos_embed", "relative_position", "rel_pos")
_EPS = 1e-7


def random_directions(
    model: nn.Module, *, mode: DirectionMode = "filter", vectors: bool = False, seed: int = 0, count: int = 2
) -> list[Direction]:
    """Return random Gaussian directions whose parts have the norms of the model's weights.

    ``filter`` follows Li et al. (2018), as in Chen et al. (2022): every output filter of a direction, its
    numbers for one index of the first axis, gets the norm of the model's. ``reference`` is what Park and Kim's code
    does: the norm is taken along the first axis, so that there is one for every input of a linear layer, and for every
    place in the window of a convolution; of a class token, whose first axis has length 1, every number is a part of its
    own.

    In both, as in Park and Kim (2022), position embeddings do not move, nor do tensors of one axis (biases, norms,
    LayerScale) unless ``vectors``, nor do buffers: BatchNorm keeps the statistics that it has.

    Args:
        model: whose weights give the norms.
        mode: ``filter`` or ``reference``.
        vectors: tensors of one axis move too, each scaled as a whole.
        seed: of the Gaussian numbers, which are the same for both modes and on every device.
        count: of directions.

    Returns:
        For each direction, steps by parameter's name, like the parameters in shape, type and device.

    Raises:
        UsageError: the mode is unknown, or nothing moves.
    """
    if mode not in MODES:
        raise UsageError(f"unknown directions {mode!r}; give {' or '.join(MODES)}")
    generator = torch.Generator().manual_seed(seed)
    directions: list[Direction] = []
    for _ in range(count):
        direction: Direction = {}
        for name, p in model.named_parameters():
            drawn = torch.randn(
                p.shape, generator=generator
            )  # also for tensors that do not move, so that options do not change the others
            if (p.ndim >= 2 or vectors) and not any(part in name for part in _POSITIONS):
                direction[name] = _scaled(drawn.to(p), p.detach(), mode)
        directions.append(direction)
    if not directions or not directions[0]:
        raise UsageError("no weights to move: the model has no tensor with two or more axes; use `vectors`")
    return directions


def _scaled(drawn: Tensor, like: Tensor, mode: DirectionMode) -> Tensor:
    if like.ndim < 2:
        dims: tuple[int, ...] = tuple(range(like.ndim))
    else:
        dims = tuple(range(1, like.ndim)) if mode == "filter" else (0,)
    own, wanted = (torch.linalg.vector_norm(t, dim=dims or None, keepdim=True) for t in (drawn, like))
    return drawn * (wanted / (own + _EPS))
