"""Loads back-ends for one source, and exports the files that they run."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from vtk.errors import UsageError, VerificationError, VtkError
from vtk.models.devices import FP8
from vtk.profiling.config import ProfileConfig
from vtk.profiling.inputs import Inputs
from vtk.profiling.memory import release
from vtk.profiling.reference import FILES, Answers, Loader, Reference, reference_of
from vtk.runtime.backends.base import Backend, needs_onnx
from vtk.runtime.data_option import fp8_images
from vtk.runtime.run_conditions import openvino_precision
from vtk.runtime.source import Source

CPU_ONLY = ("ort-cpu", "openvino")
"""Back-ends that run on the CPU also where ``--device auto`` means CUDA."""


class Session:
    """Files that it has to export first live as long as the session.

    ``auto``: nobody chose a precision, so each back-end computes in its own.

    Attributes:
        stopped: set where somebody pressed Ctrl-C while cells were measured.
    """

    def __init__(
        self,
        config: ProfileConfig,
        source: Source,
        load: Loader,
        device: torch.device,
        threads: int,
        reference: "Source | Answers | None" = None,
        auto: bool = False,
    ) -> None:
        self.config, self.source, self.load, self.device, self.threads = config, source, load, device, threads
        self._reference = reference or source
        self._auto = auto
        self.stopped = False
        self._files = ExitStack()
        self._exported: dict[tuple[str, str], Source | VtkError] = {}
        self._export_s: dict[tuple[str, str], float] = {}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def prepare(self, names: Sequence[str]) -> None:
        """Export what back-ends need, and load each one that was asked for by name once.

        So an absent one ends the run before it has begun, and nothing is printed into the progress bar later.
        """
        for name in self.config.backends:
            if not supports(name, self.source.kind):  # refused before anything is exported for the others
                device, dtype = self.device, self.precision(name)
                self.load(name, self.source, device=device, dtype=dtype, threads=self.threads).close()
        for name in names:
            self._source_for(name)
        for name in self.config.backends:
            if isinstance(self._source_for(name), VerificationError):
                continue  # a row says so
            if name == "eager" and self.source.kind not in FILES:
                continue  # torch is here
            if self.config.precision == FP8:
                continue  # calibrated once is enough
            with self.loaded(name):
                pass

    def reference(self, inputs: Inputs) -> Reference:
        """Compute what outputs are compared with.

        Raises:
            UsageError: a reference that takes other images than the source, or is itself a file of many tasks.
        """
        if not isinstance(self._reference, Source):
            return self._reference(inputs)
        precision = self.config.precision
        return reference_of(self.source, self._reference, inputs, precision, self.load, self.device, self.threads)

    def prepare_s(self, name: str) -> float | None:
        """Return the seconds that making the file for ``name`` took, None where it needs none."""
        return self._export_s.get(self._file_for(name))

    def precision(self, name: str) -> str:
        """Return the precision of a back-end's products: the profile's, or where nobody chose one OpenVINO's own."""
        if name == "openvino" and self._auto:
            return openvino_precision(None)[0]
        return self.config.precision

    def _file_for(self, name: str) -> tuple[str, str]:
        """Return kind and precision of the file that a back-end runs; OpenVINO rounds an fp32 file by itself."""
        return file_kind(name), "fp32" if name == "openvino" else self.config.precision

    @contextmanager
    def loaded(self, name: str) -> Iterator[Backend]:
        """Load a back-end, and close it at the end of the block.

        Raises:
            VtkError: it, or the file that it runs, cannot be had.
        """
        source = self._source_for(name)
        if isinstance(source, VtkError):
            raise source
        # `--device auto` may mean CUDA; a CPU back-end asked for by name still runs, and its row says where
        device = torch.device("cpu") if name in CPU_ONLY and self.config.device == "auto" else self.device
        options: dict[str, Any] = {}
        if name.startswith("bank") and self.config.tasks:
            options["tasks"] = self.config.tasks
        if needs_onnx(name) and source.facts.preprocessing:
            options["raw"] = True
        options |= fp8_images(source, self.config.precision, self.config.data)
        backend = self.load(name, source, device=device, dtype=self.precision(name), threads=self.threads, **options)
        try:
            if "raw" in options and not {"logits", "probabilities"} & set(getattr(backend, "outputs", ("logits",))):
                raise UsageError(f"{source.path} gives no logits to compare; export it with --output both")
            yield backend
        finally:
            backend.close()
            del backend
            release(device, collect=True)

    def file_of(self, name: str) -> Path | None:
        """Return the file that a back-end runs, None for a model in torch."""
        source = self._source_for(name)
        return source.path if isinstance(source, Source) and source.kind in FILES else None

    def _source_for(self, name: str) -> Source | VtkError:
        """Return what ``name`` runs: the source, or a file exported from it once."""
        kind, _ = wanted = self._file_for(name)
        if not kind or kind == self.source.kind or self.source.kind in FILES:
            return self.source  # of the wrong kind perhaps: the back-end says so best
        if wanted not in self._exported:
            start = time.perf_counter()
            self._exported[wanted] = self._export(wanted)
            if isinstance(self._exported[wanted], Source):
                self._export_s[wanted] = time.perf_counter() - start
        return self._exported[wanted]

    def _export(self, wanted: tuple[str, str]) -> Source | VtkError:
        kind, precision = wanted
        # both need onnx, which the other back-ends do without
        try:
            if kind == "aoti":
                from vtk_export.aoti.export import temporary_aoti

                exported = temporary_aoti(self.source, precision=precision, device=self.device, threads=self.threads)
                return self._files.enter_context(exported)
            from vtk_export.onnx.export import temporary_onnx

            return self._files.enter_context(temporary_onnx(self.source, dtype=precision))  # type: ignore[arg-type]
        except VtkError as error:
            return error


def supports(name: str, kind: str) -> bool:
    """Return whether a back-end runs a kind of source, exported on the spot if need be."""
    if name.startswith("bank"):
        return kind == "pack"
    if name == "tensorrt":
        return kind in ("tensorrt", "onnx")
    return kind not in FILES or kind == file_kind(name) or (name, kind) == ("openvino", "openvino")


def file_kind(name: str) -> str:
    """Return the kind of file that a back-end runs, empty for a model in torch."""
    return "onnx" if needs_onnx(name) else "aoti" if name == "aoti" else ""
