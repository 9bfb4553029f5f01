"""Loads back-ends for one source, exports for them what they run, and knows the right logits."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from vtk.errors import VerificationError, VtkError
from vtk.profiling.compare import torch_reference
from vtk.profiling.config import ProfileConfig
from vtk.profiling.memory import release
from vtk.runtime.backend import Backend, predictor
from vtk.runtime.source import Source
from vtk_export.aoti import temporary_aoti
from vtk_export.onnx import temporary_onnx

Loader = Callable[..., Backend]


class Session:
    """Files that it has to export first live as long as the session."""

    def __init__(
        self,
        config: ProfileConfig,
        source: Source,
        load: Loader,
        device: torch.device,
        threads: int,
        reference: Source | None = None,
    ) -> None:
        self.config, self.source, self.load, self.device, self.threads = config, source, load, device, threads
        self._reference = reference or source
        self._files = ExitStack()
        self._made: dict[str, Source | VtkError] = {}
        self._made_s: dict[str, float] = {}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def prepare(self, names: Sequence[str]) -> None:
        """Export what back-ends need, and load each one that was asked for by name once.

        So an absent one ends the run before it has begun, and nothing is printed into the progress bar later.
        """
        for name in names:
            self._source_for(name)
        for name in self.config.backends:
            if isinstance(self._source_for(name), VerificationError):
                continue  # a row says so
            if name == "eager" and self.source.kind not in ("onnx", "aoti"):
                continue  # torch is here
            with self.loaded(name):
                pass

    def reference(self, images: Tensor) -> tuple[Tensor, str, tuple[str, ...]]:
        """Return logits (len(images), classes), fp32, CPU, how they were computed, and what weakens them."""
        source = self._reference
        given = "" if source is self.source else f" of {source.name}"
        if source.kind not in ("onnx", "aoti"):
            return torch_reference(source.model(), images), f"torch fp32 on the CPU{given}", ()
        if source.kind == "onnx":
            options: dict[str, Any] = {"device": "cpu", "optimize": False}
            name, said = "ort-cpu", f"onnxruntime on the CPU without graph optimisation{given}"
            cautions: tuple[str, ...] = ()
        else:
            name, options, said = "aoti", {"device": self.device}, "the file itself, one image at a time"
            cautions = ("nothing independent is at hand for a .pt2 file: give the pack it was made of as --reference",)
        backend = self.load(name, source, dtype=self.config.precision, threads=self.threads, **options)
        try:
            predict = predictor(backend)
            size = backend.batch or (1 if source.kind == "aoti" else 8)
            logits = torch.cat([predict(chunk).float().cpu() for chunk in images.split(size)])
        finally:
            backend.close()
        return logits, said, cautions

    def prepare_s(self, name: str) -> float | None:
        """Return the seconds that making the file for ``name`` took, None where it needs none."""
        return self._made_s.get(form(name))

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
        device = torch.device("cpu") if name == "ort-cpu" and self.config.device == "auto" else self.device
        options = {"tasks": self.config.tasks} if name == "bank" and self.config.tasks else {}
        backend = self.load(name, source, device=device, dtype=self.config.precision, threads=self.threads, **options)
        try:
            yield backend
        finally:
            backend.close()
            del backend
            release(device, collect=True)

    def _source_for(self, name: str) -> Source | VtkError:
        """Return what ``name`` runs: the source, or a file exported from it once."""
        kind = form(name)
        if not kind or kind == self.source.kind or self.source.kind in ("onnx", "aoti"):
            return self.source  # of the wrong kind perhaps: the back-end says so best
        if kind not in self._made:
            start = time.perf_counter()
            self._made[kind] = self._export(kind)
            if isinstance(self._made[kind], Source):
                self._made_s[kind] = time.perf_counter() - start
        return self._made[kind]

    def _export(self, kind: str) -> Source | VtkError:
        try:
            if kind == "aoti":
                made = temporary_aoti(
                    self.source, precision=self.config.precision, device=self.device, threads=self.threads
                )
                return self._files.enter_context(made)
            return self._files.enter_context(temporary_onnx(self.source, dtype=self.config.precision))
        except VtkError as error:
            return error


def form(name: str) -> str:
    """Return the kind of file that a back-end runs, empty for a model in torch."""
    return "onnx" if name.startswith("ort-") else "aoti" if name == "aoti" else ""
