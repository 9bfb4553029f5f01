"""Reads weights of Google's JAX and Flax code (``.npz``) with the model's loader in timm, without pickle."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk.errors import DataError, UsageError
from vtk.models.weights.files import Stored
from vtk.models.weights.rename import stored_model
from vtk.readers import check_plain, reading

_TABLES = ("Transformer/posembed_input/pos_embedding", "pos_embedding")
_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/")
_STACKED = "Transformer/encoderblock/LayerNorm_0/scale"
_MOST = 1 << 32  # values; above any Vision Transformer published in this format
_ARRAYS, _WIDEST = 10_000, 16
_TIMES, _SMALL = 2, 1 << 26
"""A file may have `_TIMES` times the values of the model plus `_SMALL`: JAX's classifier often has 21,843 classes."""


def read_npz(name: str, kwargs: Mapping[str, Any], path: Path) -> Stored:
    """Read a file as the weights of a timm model, under timm's names and at the stored size.

    Args:
        name: timm model name.
        kwargs: arguments for timm.
        path: an archive of arrays.

    Returns:
        The tensors in the file, without a classifier of another width than timm's.

    Raises:
        DataError: not such an archive, or of another model.
        UsageError: timm cannot read ``.npz`` files for this model.
    """
    shapes = _shapes(path)
    table = next((shape for key, shape in shapes.items() if key.endswith(_TABLES)), None)
    sized = Stored({} if table is None or len(table) != 3 else {"pos_embed": torch.empty(table, device="meta")})
    # the model at the stored size; tensors that stay NaN were not in the file
    model, _ = stored_model(name, kwargs, sized)
    load: Any = getattr(model, "load_pretrained", None)
    blocks: Any = getattr(model, "blocks", None)
    if load is None or blocks is None:
        raise UsageError(f"{path}: timm cannot read .npz files for `{name}`; give a .safetensors or .pth file")
    if (found := _depth(shapes)) != len(blocks):
        raise DataError(f"{path} has {found} blocks, `{name}` has {len(blocks)}; is --model right?")
    own = sum(value.numel() for value in model.state_dict().values())
    if (held := sum(int(np.prod(shape, dtype=object)) for shape in shapes.values())) > _TIMES * own + _SMALL:
        raise DataError(f"{path} has {held:,} values, `{name}` has {own:,}; is --model right?")
    model = model.to_empty(device="cpu")
    tensors: dict[str, Tensor] = {k: v for k, v in model.state_dict().items() if v.is_floating_point()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
        with reading(path, f"does not look like weights for `{name}`", "is --model right?"):
            load(str(path))
    return Stored({k: v.detach() for k, v in tensors.items() if not bool(v.isnan().all())})


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an archive's arrays from their headers."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file")
    check_plain(path, "a .npz archive")
    shapes: dict[str, tuple[int, ...]] = {}
    with reading(path, "is not a whole .npz archive"), zipfile.ZipFile(path) as archive:
        if len(archive.infolist()) > _ARRAYS:
            raise DataError(f"{path} has {len(archive.infolist()):,} arrays, which no Vision Transformer has")
        for entry in archive.infolist():
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)  # type: ignore[arg-type]
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
                shape, _, dtype = (read or np.lib.format.read_array_header_2_0)(file)  # type: ignore[arg-type]
            if dtype.hasobject:
                raise DataError(f"{path} has Python objects, which could run code; give an archive of plain arrays")
            if dtype.itemsize > _WIDEST or min(shape, default=0) < 0:
                raise DataError(
                    f"{path} has an array of {str(dtype)[:40]} {str(shape)[:60]}, which no Vision Transformer has"
                )
            shapes[entry.filename.removesuffix(".npy")] = shape
    total = sum(int(np.prod(shape, dtype=object)) for shape in shapes.values())
    if not shapes or total > _MOST:
        raise DataError(f"{path} has {total:,} values in {len(shapes)} arrays, which no Vision Transformer has")
    return shapes


def _depth(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of blocks, which are separate or stacked in one array."""
    stacked = next((shape for key, shape in shapes.items() if key.endswith(_STACKED)), None)
    if stacked:
        return int(stacked[0])
    return len({found[1] for key in shapes if (found := _BLOCK.search(key))})
