"""Runs a model on images of another size than it was built for, such as small crops beside whole images.

timm's models with ``dynamic_img_size`` resample their position table in every forward pass; the others are built for
one size. `at_size` does the same for any model with one table of absolute positions and a stem of patches; models
without such a table (convolutional networks) need nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.volo import VOLO
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.task_parameters import grid_of

Size = tuple[int, int]
_TABLE = "pos_embed"


@contextlib.contextmanager
def at_size(model: nn.Module, size: Size) -> Iterator[None]:
    """Let ``model`` take images of ``size`` (height and width in pixels) inside of the context.

    The position table that it sees is resampled bicubically, with antialias, as timm does it; gradients flow through
    that to the table itself.

    Raises:
        ValueError: a VOLO, whose map of positions would be added to a map of one place without an error.
    """
    embed: Any = getattr(model, "patch_embed", None)
    grid = grid_of(model)
    table: Any = getattr(model, _TABLE, None)  # of a 16-bit run the cast of this forward pass
    if isinstance(model, VOLO) and model.pos_embed is not None:
        raise ValueError(f"its map of {'×'.join(map(str, model.pos_embed.shape[1:3]))} positions is for one size")
    with contextlib.ExitStack() as stack:
        if getattr(embed, "strict_img_size", False):
            embed.strict_img_size = False
            stack.callback(setattr, embed, "strict_img_size", True)
        if grid is not None and isinstance(table, Tensor) and not getattr(model, "dynamic_img_size", False):
            patch = _pair(getattr(embed, "patch_size", 1))
            new = (size[0] // patch[0], size[1] // patch[1])
            if new != grid and table.ndim == 3 and table.shape[1] >= grid[0] * grid[1]:
                prefix = table.shape[1] - grid[0] * grid[1]
                stack.enter_context(_shown(model, resample_abs_pos_embed(table, list(new), list(grid), prefix)))
        yield


def check_runs(model: nn.Module, size: Size, in_chans: int, hint: str) -> None:
    """Run one image of ``size`` through a model, on the device of its weights.

    Args:
        model: its mode and weights stay as they are.
        size: height and width in pixels.
        in_chans: channels of an image.
        hint: what to do about it, for the message.

    Raises:
        UsageError: the model does not take this size.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), at_size(model, size):
            model(torch.zeros(1, in_chans, *size, device=device))
    except NotImplementedError:
        return  # on the meta device: an operator that needs values
    except Exception as error:  # whatever a model raises whose windows, tables or stages do not fit
        why = (" ".join(str(error).split()) or type(error).__name__)[:120].rstrip(" .:;,")
        raise UsageError(
            f"{type(model).__name__} does not take crops of {size[0]}×{size[1]} px ({why}); {hint}"
        ) from error
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _shown(model: nn.Module, table: Tensor) -> Iterator[None]:
    """Let ``model`` see ``table`` in place of its own; Python finds it before it asks for the parameter."""
    own = model.__dict__
    before = own.get(_TABLE)
    own[_TABLE] = table
    try:
        yield
    finally:
        del own[_TABLE]
        if before is not None:
            own[_TABLE] = before


def _pair(value: int | tuple[int, int]) -> Size:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
