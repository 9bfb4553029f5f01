"""The local-transformer stem (Touvron et al. 2022, Table 7): a small transformer among the pixels of each patch.

The table names Transformer in Transformer (Han et al. 2021) and 19.12 GFLOPS for a ViT-B of twelve blocks, and no more.
So the stem is made as TNT makes its first tokens: a convolution 7 × 7 of stride 4 over the image, a position per place
in a patch, layers of attention and FFN among the (P/4)² places of a patch, and norm, projection, norm. Its 40 channels
and 4 heads are those of TNT-B's inner layers; their number, 24, is the one that the cost leaves: 19.10 GFLOPS as torch
counts, which counts 17.56 where the paper has 17.58. The convolution overlaps neighbouring patches.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.initialization.draw import reset, reset_tensor
from vtk.models.stems.names import ActivationName
from vtk.models.stems.shape import StemShape

WIDTH, HEADS, DEPTH = 40, 4, 24
"""Channels and heads of the layers (TNT-B's inner ones), and their number by default."""
STRIDE = 4
"""Pixels between the places of a patch, as in TNT."""


class LocalLayer(nn.Module):
    """Attention and FFN among the places of one patch, norms before them; queries, keys and values have no bias.

    Args:
        shape: device and type of the parameters.
        act: activation of the FFN.
    """

    def __init__(self, shape: StemShape, act: ActivationName) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, **shape.factory)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, **shape.factory)
        self.proj = nn.Linear(WIDTH, WIDTH, **shape.factory)
        self.norm2 = nn.LayerNorm(WIDTH, **shape.factory)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH, **shape.factory)
        self.act = shape.activation(act, 4 * WIDTH, last=True)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH, **shape.factory)

    def forward(self, x: Tensor) -> Tensor:
        """Map (patches, places, `WIDTH`) to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * (WIDTH // HEADS) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).flatten(2))
        y: Tensor = x + self.fc2(self.act(self.fc1(self.norm2(x))))
        return y


class LocalTransformer(nn.Module):
    """Layers among the places of each patch, and the projection to its token.

    Args:
        shape: channels and patch of the stem.
        act: activation of the FFNs.
        depth: number of layers.

    Attributes:
        position: (1, places, `WIDTH`), places row by row.
        undecayed: names of parameters without weight decay: the positions, as in TNT.
    """

    undecayed = ("position",)

    def __init__(self, shape: StemShape, act: ActivationName, depth: int) -> None:
        super().__init__()
        self.places = (shape.patch[0] // STRIDE, shape.patch[1] // STRIDE)
        count = self.places[0] * self.places[1]
        self.position = nn.Parameter(torch.empty(1, count, WIDTH, **shape.factory))
        self.layers = nn.Sequential(*(LocalLayer(shape, act) for _ in range(depth)))
        self.norm1 = nn.LayerNorm(count * WIDTH, **shape.factory)
        self.proj = nn.Linear(count * WIDTH, shape.dim, **shape.factory)
        self.norm2 = nn.LayerNorm(shape.dim, **shape.factory)
        reset_tensor(self.position, "stem.local_position")
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                reset(layer, "stem.local_linear")

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, `WIDTH`, h·places, w·places) to tokens on their grid, (B, C, h, w)."""
        (rows, columns), (height, width) = self.places, x.shape[2:]
        grid = (height // rows, width // columns)
        x = x.reshape(-1, WIDTH, grid[0], rows, grid[1], columns).permute(0, 2, 4, 3, 5, 1)
        x = self.layers(x.reshape(-1, rows * columns, WIDTH) + self.position)
        x = self.norm2(self.proj(self.norm1(x.flatten(1))))
        y: Tensor = x.reshape(-1, *grid, x.shape[-1]).permute(0, 3, 1, 2)
        return y


def local_transformer_stem(shape: StemShape, act: ActivationName, depth: int | None = None) -> nn.Sequential:
    """Return the stem: ``conv`` and ``local``.

    Args:
        shape: channels and patch of the stem.
        act: activation of the FFNs.
        depth: number of layers; 24 by default.

    Raises:
        UsageError: a patch that is no multiple of 4 pixels, or of only 4, which is one place; or no layers.
    """
    if any(side % STRIDE or side == STRIDE for side in shape.patch):
        height, width = shape.patch
        raise UsageError(
            f"`--stem` local-transformer needs patches of 8, 12, 16, … pixels; this model's are {height} × {width}"
        )
    if depth is not None and (type(depth) is not int or depth < 1):
        raise UsageError(f"`--stem-depth` is {depth!r}; allowed is at least 1")
    conv = nn.Conv2d(shape.in_chans, WIDTH, 7, STRIDE, 3, **shape.factory)
    return nn.Sequential(OrderedDict(conv=conv, local=LocalTransformer(shape, act, depth or DEPTH)))
