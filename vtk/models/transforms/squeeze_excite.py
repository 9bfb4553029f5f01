"""Squeeze-and-excitation in FFNs, which Hyeon-Woo et al. 2023 (Table 3) compare with Context Broadcasting.

The paper describes it as pooling to a channel descriptor, two linear layers and a sigmoid (Hu et al., 2018), without
its place. Here it is at the end of the FFN, like Context Broadcasting, its pooling is the mean of all tokens, and its
reduction is 16, as in the original. Initially it halves the output of the FFN (the sigmoid of about 0).
"""

from collections.abc import Sequence

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.initialization.draw import reset
from vtk.models.transforms.blocks import branch_modules, choose_layers, find_blocks
from vtk.models.transforms.registry import register

_WHAT = "squeeze-and-excitation"


class SqueezeExcite(nn.Module):
    """x ⊙ sigmoid(W₂·relu(W₁·mean(x))), the mean over tokens.

    Args:
        dim: C.
        hidden: outputs of W₁.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self, dim: int, hidden: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, device=device, dtype=dtype)
        for layer in (self.fc1, self.fc2):
            reset(layer, "squeeze_excite.linear")

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C)."""
        gate = self.fc2(torch.relu(self.fc1(x.mean(dim=1, keepdim=True)))).sigmoid()
        y: Tensor = x * gate
        return y


class SqueezeExciteMlp(Mlp):  # type: ignore[misc]
    """timm's `Mlp` followed by squeeze-and-excitation.

    Attributes:
        se: the squeeze-and-excitation module.
    """

    se: SqueezeExcite

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C)."""
        return self.se(super().forward(x))  # type: ignore[no-any-return]


@register("add_squeeze_excite")
def add_squeeze_excite(
    model: nn.Module, *, reduction: int = 16, layers: str | Sequence[int] = "all"
) -> dict[str, str | None]:
    """Add squeeze-and-excitation to the end of FFNs, in place; tensors keep their names.

    Args:
        model: a timm Vision Transformer, also of parallel branches (each with its own), a PiT or an MLP-Mixer.
        reduction: the hidden width is C divided by it.
        layers: ``all``, ``upper`` (the upper half of the blocks) or block numbers from 0.

    Returns:
        The map from the model's keys to themselves, None for the new layers.

    Raises:
        UsageError: a model or an FFN of another kind; the model is unchanged.
    """
    if type(reduction) is not int or reduction < 1:
        raise UsageError(f"`reduction` is {reduction!r}; allowed is at least 1")
    blocks, before = find_blocks(model, _WHAT), set(model.state_dict())
    found = [each for i in choose_layers(layers, len(blocks)) for each in branch_modules(*blocks[i], "mlp", _WHAT)]
    for name, mlp in found:
        if type(mlp) is not Mlp:
            raise UsageError(f"{name} is a {type(mlp).__name__}; only timm's plain Mlp can have {_WHAT}")
        if mlp.fc2.out_features < reduction:
            raise UsageError(f"`reduction` is {reduction}; {name} has {mlp.fc2.out_features} channels: give less")
    for _, mlp in found:
        weight, dim = mlp.fc2.weight, mlp.fc2.out_features
        mlp.__class__ = SqueezeExciteMlp
        mlp.se = SqueezeExcite(dim, dim // reduction, device=weight.device, dtype=weight.dtype).train(mlp.training)
    return {key: key if key in before else None for key in model.state_dict()}
