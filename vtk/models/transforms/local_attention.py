"""Local attention (Park and Kim 2022, figure 7): a patch attends only to the k×k patches around it.

The transform ``local_attention`` adds a mask to timm's attention: all tensors keep their names, and no weights are
added. The paper takes its neighbourhoods from Yang et al. (2019) "by unfolding the feature maps in the same way as
convolutions" and does not define the border or the class token. Here a patch at the border has fewer neighbours (no
zero keys outside the image, which would enter the softmax), and prefix tokens attend to all tokens and are attended by
all. The paper's 8×8 neighbourhood of an 8×8 map is plain attention, the model without this transform.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.structure import unusual_part
from vtk.models.task_parameters import grid_of
from vtk.models.transforms.blocks import branch_modules, choose_layers, find_blocks
from vtk.models.transforms.registry import register

_WHAT = "local attention"


class LocalAttention(Attention):  # type: ignore[misc]
    """timm's `Attention` whose queries attend only to the keys in ``local_mask``.

    Attributes:
        local_mask: (N, N) of booleans, query by key; not in the state dict, since it is defined by the model's grid.
    """

    local_mask: Tensor

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C).

        Args:
            x: tokens of the grid that the mask was made for.
            attn_mask: another mask or bias, as in timm.
            is_causal: also mask later tokens.

        Raises:
            UsageError: another number of tokens.
        """
        mask = self.local_mask
        if x.shape[1] != len(mask):
            raise UsageError(
                f"local attention is for {len(mask)} tokens and got {x.shape[1]}: it needs the whole grid of one "
                "size; do not drop patches, or build the model with another --img-size"
            )
        if is_causal:
            mask = mask & torch.ones_like(mask).tril()
        if attn_mask is not None:
            mask = mask & attn_mask if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~mask, float("-inf"))
        y: Tensor = super().forward(x, attn_mask=mask)
        return y


@register("local_attention")
def local_attention(model: nn.Module, *, kernel: int, layers: str | Sequence[int] = "all") -> dict[str, str | None]:
    """Limit the attention of a Vision Transformer to neighbourhoods of k×k patches, in place.

    Args:
        model: a timm VisionTransformer of one image size, also of parallel branches.
        kernel: k, odd: a patch has (k - 1) / 2 neighbours to each side.
        layers: ``all``, ``upper`` (the upper half of the blocks) or block numbers from 0.

    Returns:
        The map from the model's keys to themselves.

    Raises:
        UsageError: another kind of model or attention, or an even kernel; the model is unchanged.
    """
    if type(kernel) is not int or kernel < 1 or kernel % 2 == 0:
        raise UsageError(f"`kernel` is {kernel!r}; allowed is an odd number of patches, such as 3 or 5")
    if why := unusual_part(model):
        raise UsageError(f"{why}, so its tokens are unknown: it cannot have {_WHAT}")
    blocks = find_blocks(model, _WHAT)
    grid, embed = grid_of(model), model.patch_embed
    if grid is None or getattr(model, "dynamic_img_size", False) or not getattr(embed, "strict_img_size", True):
        raise UsageError(
            f"{type(model).__name__} takes images of any size, and {_WHAT} needs a fixed one; if it has the argument, "
            "give --model-kwargs dynamic_img_size=false"
        )
    found = [each for i in choose_layers(layers, len(blocks)) for each in branch_modules(*blocks[i], "msa", _WHAT)]
    for name, attn in found:
        if type(attn) is not Attention:
            raise UsageError(f"{name} is a {type(attn).__name__}; only timm's plain Attention can have {_WHAT}")
    prefix: Any = getattr(model, "num_prefix_tokens", 0)
    for _, attn in found:
        attn.__class__ = LocalAttention
        mask = neighbours(grid, kernel, prefix, attn.qkv.weight.device)
        attn.register_buffer("local_mask", mask, persistent=False)
    return {key: key for key in model.state_dict()}


def neighbours(grid: tuple[int, int], kernel: int, prefix: int = 0, device: torch.device | None = None) -> Tensor:
    """Return the mask of tokens, (N, N), query by key: prefix tokens first, then the grid row by row.

    Args:
        grid: height and width in patches.
        kernel: odd side of the neighbourhood.
        prefix: number of prefix tokens, which are not masked.
        device: of the result.
    """
    height, width = (torch.arange(side, device=device) for side in grid)
    near_y, near_x = ((side[:, None] - side[None]).abs() <= kernel // 2 for side in (height, width))
    patches = (near_y[:, None, :, None] & near_x[None, :, None, :]).flatten(2).flatten(0, 1)
    mask = torch.ones(prefix + len(patches), prefix + len(patches), dtype=torch.bool, device=device)
    mask[prefix:, prefix:] = patches
    return mask
