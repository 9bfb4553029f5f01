"""The protocol of all back-ends, and the table of the back-ends of this version."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from vtk.errors import UnavailableError, UsageError
from vtk.evaluation.config import FP8_BACKENDS
from vtk.evaluation.labels import check_finite
from vtk.models.devices import DTYPES, FP8, dtype_name, resolve_device, resolve_dtype
from vtk.options.shared import MOST_THREADS
from vtk.runtime.source import Source

BACKENDS: dict[str, tuple[str, str]] = {
    "eager": ("vtk.runtime.backends.torch_backend", "EagerBackend"),
    "compile": ("vtk.runtime.backends.torch_backend", "CompileBackend"),
    "fused": ("vtk.runtime.backends.fused_backend", "FusedBackend"),
    "fused+graph": ("vtk.runtime.backends.fused_backend", "GraphBackend"),
    "fused+nograph": ("vtk.runtime.backends.fused_backend", "NoGraphBackend"),
    "ort-cpu": ("vtk.runtime.backends.ort_backend", "OrtCpuBackend"),
    "ort-cuda": ("vtk.runtime.backends.ort_backend", "OrtCudaBackend"),
    "ort-trt": ("vtk.runtime.backends.ort_trt_backend", "OrtTrtBackend"),
    "openvino": ("vtk.runtime.backends.openvino_backend", "OpenvinoBackend"),
    "aoti": ("vtk.runtime.backends.aoti_backend", "AotiBackend"),
    "bank": ("vtk.runtime.backends.bank_backend", "BankBackend"),
    "bank+graph": ("vtk.runtime.backends.bank_backend", "BankGraphBackend"),
    "bank+nograph": ("vtk.runtime.backends.bank_backend", "BankNoGraphBackend"),
    "tensorrt": ("vtk.runtime.backends.tensorrt_backend", "TensorrtBackend"),
}
"""Name to (module, class) of the back-ends of this version."""

_PLANNED = ("server",)


class Backend(Protocol):
    """A loaded model that maps images to logits.

    Attributes:
        name: of the back-end on the command line.
        device: where the outputs are.
        dtype: of weights and arithmetic; inputs are cast to it.
        provider: what really runs, for instance ``torch cpu`` or ``CPUExecutionProvider``.
        load_s: seconds for loading (reading, building, moving), without the compilation at the first run.
        batch: the only batch size that it accepts; None for any.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    provider: str
    load_s: float
    batch: int | None

    @classmethod
    def check(cls) -> None:
        """Check that the compiler, device and provider are available.

        Raises:
            UnavailableError: names what is missing.
        """
        ...

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> "Backend":
        """Build it from ``source``; `load_backend` checks and converts the arguments.

        Raises:
            UsageError: this back-end does not run the source or the precision.
            UnavailableError: a provider, compiler or package is missing.
        """
        ...

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W) to ``logits`` (B, classes) on ``device``; may return before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until all calls of `run` are done."""
        ...

    def close(self) -> None:
        """Free memory and restore settings; the back-end cannot be used afterwards."""
        ...


def load_backend(
    name: str,
    source: Source,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "fp32",
    threads: int | None = None,
    **options: Any,
) -> Backend:
    """Load ``source`` with the back-end called ``name``.

    Args:
        name: a key of `BACKENDS`.
        source: from `vtk.runtime.opening.open_source`.
        device: ``cpu``, ``cuda``, ``cuda:1`` or ``auto`` (CUDA when there is one). A torch device passes through.
        dtype: ``fp32``, ``bf16`` or ``fp16``; ``fp8`` with ``fused`` and ``fused+graph``.
        threads: CPU threads of one operation; None for torch's current number, in every back-end alike.
        options: of the back-end: ``channels_last`` (eager, compile), ``mode`` (compile), ``optimize`` (ort-*),
            ``cache`` and ``streams`` (openvino),
            ``tasks`` (bank), ``given`` (fp8: a `vtk.runtime.data_option.DataImages` to calibrate and to judge on).

    Raises:
        UsageError: an unknown name, precision or option, or a source that this back-end does not run.
        UnavailableError: a back-end of a later version, or a device or provider that is not available.
    """
    check_backend(name)
    check_threads(threads)
    if dtype == FP8:
        if name not in FP8_BACKENDS:
            raise UsageError(f"back-end `{name}` has no fp8; give {' or '.join(FP8_BACKENDS)}, or a file that was "
                             "exported with --dtype fp8, in its own precision")  # fmt: skip
        dtype, options = torch.bfloat16, {"given": None, **options}
    elif "given" in options:
        raise UsageError(f"`given` images are for fp8, not for {dtype}; leave them out")
    return _class(name).load(
        source, device=resolve_device(device), dtype=resolve_dtype(dtype), threads=threads, **options
    )


def precision_of(backend: Backend) -> str:
    """Return the precision of a back-end's products: ``fp32``, ``bf16``, ``fp16`` or ``fp8``."""
    arithmetic: str = getattr(backend, "arithmetic", "")
    return arithmetic if arithmetic == FP8 or arithmetic in DTYPES else dtype_name(backend.dtype)


def needs_onnx(name: str | None) -> bool:
    """Return whether a back-end runs ONNX files, so that a model in torch is exported for it."""
    return name is not None and (name.startswith("ort-") or name == "openvino")


def check_threads(threads: int | None) -> None:
    """Refuse numbers of threads that make no sense.

    Raises:
        UsageError: ``threads`` is below 1 or far above the number of CPUs.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"`--threads` is {threads}; allowed is from 1 to {MOST_THREADS}")


def check_backend(name: str) -> None:
    """Refuse a back-end that cannot run here, before anything is read, exported or compiled.

    Raises:
        UsageError: an unknown name.
        UnavailableError: a back-end of a later version, or its compiler, device or provider is missing.
    """
    if name in _PLANNED:
        raise UnavailableError(f"back-end `{name}` is not in this version; it has {', '.join(BACKENDS)}")
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"unknown back-end `{name}`; there are {', '.join(BACKENDS)}{hint}")
    _class(name).check()


def _class(name: str) -> type[Backend]:
    module, attribute = BACKENDS[name]
    backend: type[Backend] = getattr(importlib.import_module(module), attribute)
    return backend


def least_images(backend: Backend) -> int:
    """Return the least number of images of a call: above one only for an engine built for larger batches."""
    return int(getattr(backend, "least", 1))


def most_images(backend: Backend) -> int | None:
    """Return the largest number of images of a call; None if only memory limits it."""
    most: int | None = getattr(backend, "most", None)
    return most


def describe(backend: Backend) -> str:
    """Return back-end and precision, for messages."""
    return f"{backend.name} in {precision_of(backend)}"


def predictor(backend: Backend, *, check: bool = True, output: str = "logits") -> Callable[[Tensor], Tensor]:
    """Return a function from images (B, 3, H, W) to logits (B, classes), for any B even if the back-end's is fixed.

    ``output`` names another output of the back-end than the logits.

    The function raises a `VerificationError` if a logit is infinite or NaN. With ``check`` False the caller checks each
    row.
    """

    def run(images: Tensor) -> Tensor:
        least, most = (backend.batch,) * 2 if backend.batch else (least_images(backend), most_images(backend))
        if getattr(backend, "apart", False):
            most = 1  # a file of a fixed batch gets copies of the image
        if not len(images) or least <= len(images) <= (most or len(images)):
            return backend.run({"pixel_values": images})[output]
        logits = []
        for part in images.split(most or least):
            # the last rows are repeated to fill the batch, and their copies dropped again
            fill = part[-1:].expand(max(least - len(part), 0), *part.shape[1:])
            logits.append(backend.run({"pixel_values": torch.cat((part, fill))})[output][: len(part)])
        return torch.cat(logits)

    def predict(images: Tensor) -> Tensor:
        logits = run(images)
        if check:
            check_finite(logits, describe(backend))
        return logits

    return predict
