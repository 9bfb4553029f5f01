"""Bias of the scores by relative position: a number for each head and distance, and the distance of each two tokens.

    scores of head h, query i and key j  +  table[h, index[i, j]]

BEiT (Bao et al. 2022) and Swin (Liu et al. 2021, eq. 4) learn the table. With Swin V2's small network of coordinates
(Liu et al. 2022) what the network gives for each distance is the table.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import RelPosBias, RelPosMlp
from timm.models import beit
from torch import Tensor

from vtk.fused.checks import copied
from vtk.fused.norms import refusal
from vtk.fused.sizes import Derived, Stamps, derive_again, stamps
from vtk.fused.stages import frozen

_TABLES = (RelPosBias, beit.RelativePositionBias, beit.Attention)

_ALIGN = 8
"""Rows of the bias begin at multiples of this, as fused attention wants them."""


class RelativeBias(Derived):
    """An additive bias of the scores of all pairs of an image's tokens.

    Attributes:
        table: (H, distances), as trained.
        index: (N, N), int32, the distance of query and key: a column of ``table``.
        bias: (H, M, M), M ≥ N: the table by ``index``, which every pass reads; zeros beyond N. It follows from the
            other two, also when they change in place, and is in no state dict. These are H·N² numbers a block: of a
            ViT-B/16 at 224 px 5.6 million in all, beside 86 million weights. Exporters get the table and the index.
    """

    index: Tensor
    bias: Tensor

    def __init__(self, table: Tensor, index: Tensor) -> None:
        """Take a table (distances, H) and an index (N, N)."""
        super().__init__()
        self.table = frozen(table.t())
        self.register_buffer("index", index.to(torch.int32), persistent=False)
        self.register_buffer("bias", self._full(), persistent=False)
        self.register_load_state_dict_post_hook(derive_again)
        self.note()

    def forward(self) -> Tensor:
        """Return (H, M, M)."""
        if torch.compiler.is_exporting():
            return self._own()
        self.follow()
        return self.bias

    def sources(self) -> Stamps:
        """Return the state of both."""
        return stamps(self.table, self.index)

    def derive(self) -> None:
        """Write ``bias`` anew."""
        self.bias.copy_(self._full())

    def _own(self) -> Tensor:
        # ONNX's Gather takes an index of 32 bits, its GatherND, which indexing by brackets becomes, does not
        return self.table.index_select(1, self.index.flatten()).unflatten(1, self.index.shape)

    def _full(self) -> Tensor:
        spare = -self.index.shape[0] % _ALIGN
        return F.pad(self._own().detach(), (0, spare, 0, spare))


def read_bias(modules: Sequence[Any], like: Tensor, where: str) -> RelativeBias | None:
    """Return the sum of timm's modules of relative positions, None for no module.

    Args:
        modules: BEiT's attention and its model's own module have a table, `timm.layers.RelPosBias` too, and
            `timm.layers.RelPosMlp` a network.
        like: device and dtype of the arithmetic.
        where: name in the model of the first, for messages.

    Raises:
        UsageError: a module of another class, or modules of different distances.
    """
    if not modules:
        return None
    found = []
    for module in modules:
        if type(module) not in (*_TABLES, RelPosMlp):
            raise refusal(where, module, "its bias of the scores is of an unknown kind")
        found.append(_by_network(module, like) if type(module) is RelPosMlp else _by_table(module, like))
    table, index = found[0]
    for module, (other, its) in zip(modules[1:], found[1:], strict=True):
        if its.shape != index.shape or not (index.is_meta or torch.equal(its, index)):
            raise refusal(where, module, "two biases of the scores number the distances of tokens differently")
        table = table + other
    return RelativeBias(table, index)


def _by_table(module: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return table (distances, H) and index (N, N)."""
    return module.relative_position_bias_table.detach().to(like.dtype), _square(module.relative_position_index)


def _by_network(module: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    network = copied(module).to(like.dtype)
    table = network.bias_act(network.mlp(network.rel_coords_log).view(-1, module.num_heads))
    if module.bias_gain is not None:
        table = table * module.bias_gain
    index = _square(module.relative_position_index)
    if prefix := module.prefix_tokens:  # they have no position, and a bias of 0
        index = F.pad(index, (prefix, 0, prefix, 0), value=len(table))
        table = F.pad(table, (0, 0, 0, 1))
    return table, index


def _square(index: Tensor) -> Tensor:
    return index.view(math.isqrt(index.numel()), -1)
