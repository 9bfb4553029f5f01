"""``profile``: every back-end at every batch size, compared with a reference before it is timed."""

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vtk import console
from vtk.errors import UnavailableError, UsageError, VerificationError, VtkError
from vtk.files import prepare_output
from vtk.profiling.compare import DISTINCT, remarks, torch_reference
from vtk.profiling.config import ProfileConfig
from vtk.profiling.machine import device_name, versions
from vtk.profiling.measure import Plan, first_line, measure_cell, predicted_shortage
from vtk.profiling.memory import describe, is_out_of_memory, release
from vtk.profiling.result import BackendResult, Cell, ProfileResult
from vtk.runtime.backend import Backend, load_backend, predictor, resolve_device
from vtk.runtime.source import Source, open_source
from vtk_export.images import gate_images
from vtk_export.onnx import temporary_onnx

Loader = Callable[..., Backend]


def profile(source: str | Path | ProfileConfig, *, command: str = "", show_progress: bool = True) -> ProfileResult:
    """Measure latency, throughput and memory per batch size and back-end.

    A wrong output, too little memory or an absent back-end of the default set is a row of the result, not an exception;
    `ProfileResult.exit_code` says what the command line would return. With ``config.out`` the reports are written.

    Args:
        source: what to profile with default options, or the options.
        command: kept in the report.
        show_progress: a bar on a terminal, lines elsewhere.

    Raises:
        UsageError: a back-end that does not exist or does not run this kind of source.
        DataError: the source cannot be read, or ``out`` is not empty.
        UnavailableError: a device or back-end named in the options is not here.
    """
    config = source if isinstance(source, ProfileConfig) else ProfileConfig(str(source))
    if config.out is not None:
        prepare_output(config.out, overwrite=config.overwrite)
    opened = open_source(
        config.source,
        base=config.base,
        pretrained=config.pretrained,
        num_classes=config.num_classes,
        img_size=config.img_size,
        seed=config.seed,
    )
    for note in opened.notes:
        console.say(note)
    result = run(config, opened, load_backend, command=command, show_progress=show_progress)
    if config.out is not None:
        from vtk.profiling.report import write_reports

        write_reports(result, config.out)
    return result


def run(
    config: ProfileConfig, source: Source, load: Loader, *, command: str = "", show_progress: bool = True
) -> ProfileResult:
    """Measure an open ``source`` with the back-ends that ``load`` gives; `profile` without files."""
    device = resolve_device(config.device)
    names = config.backends or default_backends(device)
    before = torch.get_num_threads()
    threads = config.threads or before
    spec = source.card.input
    shape = (spec.in_chans, spec.height, spec.width)
    torch.set_num_threads(threads)
    try:
        with _Session(config, source, load, device, threads) as session:
            session.prepare(names)
            images, what = gate_images(spec, min(DISTINCT, max(config.batch_sizes)), data=None, seed=config.seed)
            reference, described = session.reference(images)
            plan = Plan(images, reference, config.precision, config.duration)
            total = len(names) * len(config.batch_sizes)
            with console.progress("profile", total, unit="cells", enabled=show_progress) as bar:
                backends = tuple(session.measure(name, plan, bar.advance) for name in names)
    finally:
        torch.set_num_threads(before)
    repeated = ", repeated in larger batches" if max(config.batch_sizes) > DISTINCT else ""
    return ProfileResult(
        source=config.source,
        kind=source.kind,
        model=source.card.model.name,
        input_shape=shape,
        device=str(device),
        device_name=device_name(str(device)),
        precision=config.precision,
        threads=threads,
        duration_s=config.duration,
        reference=described,
        inputs=f"{what}{repeated}, resident on the device in the model's precision; copies from the host are not in "
        "the times, for any back-end",
        order="one back-end after the other, batch sizes ascending, each warmed up and timed in one go",
        memory=describe(device),
        remarks=remarks(reference),
        backends=backends,
        budget_ms=config.budget_ms,
        versions=versions(),
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def default_backends(device: torch.device) -> tuple[str, ...]:
    """Return the back-ends measured when none is named."""
    if device.type == "cuda":
        return ("eager", "compile", "fused", "fused+graph", "ort-cuda")
    return ("eager", "compile", "fused", "ort-cpu")


class _Session:
    """Loads back-ends for one source; an ONNX file that it has to export first lives as long as the session."""

    def __init__(self, config: ProfileConfig, source: Source, load: Loader, device: torch.device, threads: int) -> None:
        self.config, self.source, self.load, self.device, self.threads = config, source, load, device, threads
        self._files = ExitStack()
        self._onnx: Source | VtkError | None = source if source.kind == "onnx" else None
        self._export_s: float | None = None

    def __enter__(self) -> "_Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def prepare(self, names: Sequence[str]) -> None:
        """Export what ONNX Runtime needs, and load each back-end that was asked for by name once.

        So an absent one ends the run before it has begun, and nothing is printed into the progress bar later.
        """
        if self._onnx is None and any(map(_runs_onnx, names)):
            self._onnx = self._export()
        for name in self.config.backends:
            if isinstance(self._onnx, VerificationError) and _runs_onnx(name):
                continue  # a row says so
            if name == "eager" and self.source.kind != "onnx":
                continue  # torch is here
            with self._loaded(name):
                pass

    def reference(self, images: Tensor) -> tuple[Tensor, str]:
        """Return logits (len(images), classes), fp32, CPU, and how they were computed."""
        if self.source.kind != "onnx":
            return torch_reference(self.source.model(), images), "torch fp32 on the CPU"
        options = {"device": "cpu", "dtype": self.config.precision, "threads": self.threads, "optimize": False}
        backend = self.load("ort-cpu", self.source, **options)
        try:
            predict = predictor(backend)
            logits = torch.cat([predict(chunk).float() for chunk in images.split(backend.batch or 8)])
        finally:
            backend.close()
        return logits, "onnxruntime on the CPU without graph optimisation"

    def measure(self, name: str, plan: Plan, advance: Callable[[int, str], None]) -> BackendResult:
        """Measure one back-end at every batch size."""
        sizes = sorted(self.config.batch_sizes)
        known = BackendResult(name, prepare_s=self._export_s if _runs_onnx(name) else None)
        cells: list[Cell] = []
        try:
            with self._loaded(name) as backend:
                # a compiler that met several batch sizes would make one program for all of them, and time that
                reset = getattr(backend, "reset", None)
                known = replace(
                    known, provider=backend.provider, device=str(backend.device), compiles=reset is not None
                )
                for size in sizes:
                    if reset is not None and cells:
                        reset()
                    cells.append(self._cell(backend, size, plan, cells))
                    advance(1, f"{name} batch {size}")
        except VerificationError as error:
            known = replace(known, status="mismatch", reason=str(error))
        except (UnavailableError, UsageError) as error:
            if self.config.backends:
                raise
            known = replace(known, status="unavailable", reason=str(error))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            known = replace(known, status="oom", reason=f"out of memory while loading: {first_line(error)}")
        advance(len(sizes) - len(cells), name)
        return replace(known, cells=tuple(cells) if known.status == "measured" else ())

    def _cell(self, backend: Backend, size: int, plan: Plan, cells: list[Cell]) -> Cell:
        if full := next((c.batch for c in cells if c.status == "oom"), None):
            return Cell(size, "skipped", f"not tried: batch {full} already ran out of memory")
        if shortage := predicted_shortage(cells, size, backend.device):
            return Cell(size, "oom", f"not tried: {shortage}")
        try:
            return measure_cell(backend, size, plan)
        except VtkError:
            raise
        except Exception as error:  # one bad cell must not cost the hour of measurements before it
            return Cell(size, "failed", f"{type(error).__name__}: {first_line(error)}")

    def _export(self) -> Source | VtkError:
        if self.config.precision != "fp32":
            return UsageError(f"ONNX export is fp32 in this version, not {self.config.precision}; use eager or compile")
        start = time.perf_counter()
        try:
            exported = self._files.enter_context(temporary_onnx(self.source))
        except VerificationError as error:
            return error
        self._export_s = time.perf_counter() - start
        return exported

    @contextmanager
    def _loaded(self, name: str) -> Iterator[Backend]:
        source = self._onnx if _runs_onnx(name) else self.source
        if isinstance(source, VtkError):
            raise source
        # `--device auto` may mean CUDA; a CPU back-end asked for by name still runs, and its row says where
        device = torch.device("cpu") if name == "ort-cpu" and self.config.device == "auto" else self.device
        backend = self.load(name, source, device=device, dtype=self.config.precision, threads=self.threads)
        try:
            yield backend
        finally:
            backend.close()
            del backend
            release(device, collect=True)


def _runs_onnx(name: str) -> bool:
    return name.startswith("ort-")
