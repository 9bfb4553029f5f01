"""Runs ``.pt2`` files of AOTInductor: models compiled to a shared library.

A file's metadata are compared with this machine before its library is loaded, which would crash instead of refusing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vtk.errors import DataError, UnavailableError, UsageError
from vtk.models.compiler import check_compiler
from vtk.models.devices import dtype_name
from vtk.runtime import aoti_load
from vtk.runtime.aoti_file import BATCH, DEVICE, DTYPE, MAX_BATCH, SINGLE, read_metadata
from vtk.runtime.backends.torch_base import TorchBackend
from vtk.runtime.source import Source


class AotiBackend(TorchBackend):
    """A loaded ``.pt2``. Its library reads torch's settings when it runs."""

    name = "aoti"

    def __init__(self, model: aoti_load.Model) -> None:
        super().__init__(model.device, model.dtype)
        self.most = model.max_batch
        self._model: aoti_load.Model | None = model

    @classmethod
    def check_compiler(cls) -> None:
        """Refuse to compile a file if there is no C++ compiler.

        Raises:
            UnavailableError: says so.
        """
        check_compiler("AOTInductor", "export elsewhere")

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Load ``source.path`` if its metadata fit this machine; there are no options."""
        if source.kind != "aoti" or source.path is None:
            raise UsageError(f"`aoti` runs .pt2 files, not the {source.kind} {source.name}: `vtk export aoti`")
        cls._check_options(options)
        source.require_trust(source.path)
        meta = read_metadata(source.path)
        if dtype != aoti_load.DTYPES[meta[DTYPE]]:
            raise UsageError(
                f"{source.path} computes in {meta[DTYPE]}, not in {dtype_name(dtype)}; a file's "
                f"precision is fixed, give --precision {meta[DTYPE]}"
            )
        _check_machine(source.path, meta, device)
        try:
            return cls._load_timed(lambda: cls(_load(source, meta, device)), threads)
        except (RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"{source.path} cannot be loaded ({reason}); export it again on this machine") from error

    @property
    def provider(self) -> str:
        """``aotinductor cpu`` or ``aotinductor cuda (NAME)``."""
        return f"aotinductor {self._place()}"

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes).

        Raises:
            UsageError: images of another size, or more than the file takes: the library would read beyond their end.
        """
        if self._model is None:
            raise UsageError("this back-end is closed; load it again")
        images = inputs["pixel_values"].to(self.device, self.dtype, non_blocking=True)
        try:
            with torch.inference_mode():
                return {"logits": self._model(images)}
        except (TypeError, ValueError) as error:
            raise UsageError(f"{error}: resize or split them") from error

    def close(self) -> None:
        """Drop the library and put torch's settings back."""
        self._model = None
        super().close()


def _load(source: Source, meta: Mapping[str, str], device: torch.device) -> aoti_load.Model:
    from torch._inductor.package import load_package  # type: ignore[attr-defined]

    path, spec = os.fspath(source.path or ""), source.card.input
    if BATCH in meta:
        return aoti_load.load(path, device_index=device.index)
    shape = spec.in_chans, spec.height, spec.width
    dtype, index = aoti_load.DTYPES[meta[DTYPE]], device.index if device.type == "cuda" else -1
    with aoti_load.checks("0"):  # a library's own checks would refuse a batch of one
        model = load_package(path, SINGLE, run_single_threaded=True, device_index=index)
        model(torch.zeros(2, *shape, dtype=dtype, device=device))  # its first call, at which the variable is read
    return aoti_load.Model(dict.fromkeys((aoti_load.ONE, aoti_load.MORE), model), shape, dtype, device, MAX_BATCH)


def _check_machine(path: Path, meta: Mapping[str, str], device: torch.device) -> None:
    """Refuse a file that was compiled for another torch, device or instruction set.

    Raises:
        UnavailableError: names what it was compiled for, and this machine.
    """
    kind = meta.get(DEVICE, "")
    if kind != device.type:
        raise UnavailableError(f"{path} was compiled for {kind}, and {device} was requested; give --device {kind}")
    if fault := aoti_load.machine_fault(dict(meta), device.index):
        raise UnavailableError(f"{path}: {fault}; export it again on the machine that runs it")
