"""Reads state dicts from torch files (``.pth``, ``.pt``, ``.bin``): plain tensors only, within the file's size.

torch reads with ``weights_only``, which runs no code. Such a file can still have tensors that no model can use, and
views that declare far more bytes than the file has.
"""

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import DataError
from vtk.readers import check_plain, reading, short

_NESTED = ("state_dict", "model", "model_state_dict", "teacher")
_MOST, _SMALL = 4, 64 << 20
"""Tensors may have `_MOST` times the bytes of the file (tied weights count twice) plus `_SMALL`."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
NARROW = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith("float8_") or name.startswith("float4_")
)
"""Types whose values need a separate scale."""
_FAULT = "is not a whole torch file"


def read_torch(path: Path) -> dict[str, Tensor]:
    """Read the state dict of a torch file; it may be nested one or two levels deep.

    Raises:
        DataError: no such file, damaged, without a state dict, with objects that could run code, or with tensors
            that are sparse, nested, quantised or without values, or declare far more bytes than the file has.
    """
    check_plain(path, "one of torch's")
    _check_archive(path)
    with reading(path, _FAULT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sparse tensors, which are refused
        try:
            value = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            if "global" not in short(error, 10_000).lower():
                raise
            raise DataError(
                f"{path} has Python objects besides tensors, which could run code; if you trust the file, load it "
                "with torch and save its state dict as .safetensors"
            ) from error
        found = _state_dict(value, path)
        claimed = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    size = path.stat().st_size
    if claimed > _MOST * size + _SMALL:
        raise DataError(
            f"the tensors of {path} would need {claimed:,} bytes and the file has {size:,}: they repeat values; load "
            "it with torch and save its state dict as .safetensors"
        )
    return found


def _check_archive(path: Path) -> None:
    """Refuse archives that could need unlimited memory: members much larger than the file, and byte arrays.

    torch does not compress members, and checkpoints have no byte arrays, for which a pickle gives only a length.
    """
    with reading(path, _FAULT):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                total = sum(entry.file_size for entry in archive.infolist())
                size = path.stat().st_size
                if total > _MOST * size + _SMALL:
                    raise DataError(f"{path} has {size:,} bytes and would unpack to {total:,}, as none of torch's")
                pickles = b"".join(archive.read(n) for n in archive.namelist() if n.endswith("/data.pkl"))
        else:  # of a version before 1.6, which begins with its pickles, or no file of torch's: torch says so
            with path.open("rb") as file:
                pickles = file.read(_SMALL)
        if b"bytearray" in pickles:
            raise DataError(f"{path} holds byte arrays besides tensors, so it is not read; save its state dict alone")


def _state_dict(value: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(3):
        if not isinstance(value, Mapping):
            break
        value = next((value[k] for k in _NESTED if isinstance(value.get(k), Mapping)), value)
    if not isinstance(value, Mapping) or not any(isinstance(v, Tensor) for v in value.values()):
        raise DataError(f"{path} holds no state dict; looked in the file itself and under {', '.join(_NESTED)}")
    tensors = {str(k): v for k, v in value.items() if isinstance(k, (str, int)) and isinstance(v, Tensor)}
    return {name: _plain(name, tensor, path) for name, tensor in tensors.items()}


def _plain(name: str, tensor: Tensor, path: Path) -> Tensor:
    """Return a tensor without gradient and lazy signs; refuse one that has not a value for each of its numbers."""
    kinds = {
        "has no values (it is on the meta device)": tensor.is_meta,
        "is nested": tensor.is_nested,
        "is quantised": tensor.is_quantized,
        f"is stored as {tensor.layout}": tensor.layout != torch.strided,
        f"is a {type(tensor).__name__}": type(tensor) not in _PLAIN,
    }
    if wrong := next((kind for kind, so in kinds.items() if so), None):
        raise DataError(
            f"{path}: `{name[:80]}` {wrong}, with which no plain model can be filled; load it with torch and save "
            "plain tensors as .safetensors"
        )
    return tensor.detach().resolve_conj().resolve_neg()
