"""Renames the tensors of a file to timm's keys, with the model at the stored size and timm's filter of the family."""

import inspect
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.models import clean_state_dict, model_entrypoint
from torch import Tensor, nn

from vtk.errors import VtkError
from vtk.models import parallel_models as parallel
from vtk.models.inputs import check_size, model_error
from vtk.models.meta_model import shapes_only
from vtk.models.task_parameters import grid_of, head_names, position_names
from vtk.models.weights import deit, dinov3
from vtk.models.weights.files import Stored
from vtk.readers import reading

Size = tuple[int, int]


def stored_model(
    name: str, kwargs: Mapping[str, Any], stored: Stored, classes: int = 0
) -> tuple[nn.Module, Size | None]:
    """Build the model at the size the file was stored at, so that timm's renaming resamples nothing.

    ``classes`` is the number of class names beside a file without a card, or 0.

    Returns:
        The model on the meta device, and its image size in pixels, height first; None if only a grid is known.
    """
    raw = stored.tensors
    with shapes_only():
        try:
            if stored.card is not None:
                # the file's classifier, which timm's default may lack
                kwargs = {**kwargs, "num_classes": len(stored.card.classes)}
            elif classes:
                kwargs = {**kwargs, "num_classes": classes}
            if stored.size is not None:
                return _build_sized(name, kwargs, stored.size), stored.size
            model = parallel.build(name, **kwargs)
            table, own = raw.get("pos_embed"), getattr(model, "pos_embed", None)
            if table is None or own is None or table.ndim != 3 or table.shape[1] == own.shape[1]:
                return model, check_size(name, None, kwargs) if stored.grid in (None, grid_of(model)) else None
            stem: Any = model.patch_embed
            patch = stem.patch_size
            # rows that are not patches, from the model's own table: some models have none for register tokens
            first = own.shape[1] - math.prod(stem.grid_size)
            for prefix in dict.fromkeys((first, getattr(model, "num_prefix_tokens", 1), 1, 0)):
                patches = table.shape[1] - prefix
                side = math.isqrt(max(patches, 0))
                if 0 < patches == side * side:
                    size = (side * patch[0], side * patch[1])
                    square = stored.grid in (None, (side, side))
                    return parallel.build(name, **{**kwargs, "img_size": size}), size if square else None
            return model, None
        except VtkError:
            raise
        except Exception as error:  # timm raises many kinds for sizes and arguments that do not fit
            raise model_error(name, kwargs, error) from error


def _build_sized(name: str, kwargs: Mapping[str, Any], size: tuple[int, int]) -> nn.Module:
    try:
        return parallel.build(name, **{**kwargs, "img_size": size})
    except TypeError as error:  # convolutional networks take any size, and no argument for it
        if "img_size" not in str(error):
            raise
        return parallel.build(name, **kwargs)


def rename(
    name: str, raw: dict[str, Tensor], reference: nn.Module, path: Path, gone: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under timm's keys: unchanged if they fit, otherwise through timm's filter of the family.

    Names of DINOv3's and deit's own code are changed first. The second value has notes for the user. Tensors in
    ``gone`` need not be in the file.
    """
    clean = clean_state_dict(raw)
    if dinov3.is_dinov3(clean, reference):
        return dinov3.convert(clean, reference, name, path)
    notes = []
    if deit.is_deit(clean):
        clean = deit.rename_parallel(clean)
        if deit.pad_position_table(clean, reference):
            notes.append(f"the position table of {path.name} has no entry for the class token, as in deit: 0 is used")
    needed = set(reference.state_dict()) - head_names(reference) - position_names(reference) - gone
    if needed <= set(clean):
        return clean, notes
    module = sys.modules[model_entrypoint(name.split(".")[0]).__module__]
    convert = getattr(module, "checkpoint_filter_fn", None)
    if convert is None:
        return clean, notes
    options = {}
    if "adapt_layer_scale" in inspect.signature(convert).parameters:
        options["adapt_layer_scale"] = any(".gamma_" in k for k in clean)
    with reading(path, f"does not look like weights for `{name}`", "is --model right?"):
        result = convert(dict(clean), reference, **options)
    return {k: v for k, v in result.items() if isinstance(v, Tensor)}, notes
