"""Resolves names of devices and precisions, as on the command line and in cards."""

import torch

from vtk.errors import UnavailableError, UsageError

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of precisions, on the command line, in cards and in exported files, to torch's types."""

FP8 = "fp8"
"""Name of fp8 precision: matrix products in e4m3, everything else in bf16; no dtype of a whole model."""


def resolve_device(text: str | torch.device) -> torch.device:
    """Return the device for ``cpu``, ``cuda``, ``cuda:1`` or ``auto``.

    Raises:
        UsageError: not one of these.
        UnavailableError: torch sees no CUDA device, or not as many.
    """
    if text == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"unknown device `{text}`; give cpu, cuda, cuda:N or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device `{text}` is not supported; give cpu, cuda, cuda:N or auto")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UnavailableError(f"device `{text}`: torch sees no CUDA device; `vtk doctor` says why")
        if device.index is not None and device.index >= count:
            raise UnavailableError(f"device `{text}`: there are {count} devices, cuda:0 to cuda:{count - 1}")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return torch's dtype for ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        UsageError: any other name or type.
    """
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise UsageError(f"unknown precision `{dtype}`; give {', '.join(DTYPES)}")


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a type that fused models and banks compute in: fp16, bf16, fp32 or fp64.

    Raises:
        UsageError: any other type.
    """
    if dtype not in (types := (torch.float16, torch.bfloat16, torch.float32, torch.float64)):
        raise UsageError(f"`dtype` is {dtype}; give {', '.join(map(str, types))}")
    return dtype


def itemsize(precision: str) -> int:
    """Return the bytes of a number; of fp8 those of its products' inputs."""
    return 1 if precision == FP8 else DTYPES[precision].itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``fp32``, ``bf16`` or ``fp16``."""
    return next(name for name, value in DTYPES.items() if value == dtype)
