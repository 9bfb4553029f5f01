"""`profile`: measures every back-end at every batch size, after comparison with a reference."""

import contextlib
import datetime
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch

from vtk import console
from vtk.data.pinning import parse_cores, pinned, show_cores
from vtk.errors import UsageError
from vtk.evaluation.config import FP8_BACKENDS
from vtk.filesets import open_folder
from vtk.models.devices import DTYPES, FP8, resolve_device
from vtk.options import expect
from vtk.packages import require
from vtk.profiling import ceilings
from vtk.profiling.cells import BackendResult, Cell
from vtk.profiling.compare import DISTINCT, LEAST_DISTINCT, centred, remarks
from vtk.profiling.config import ProfileConfig
from vtk.profiling.inputs import make_inputs
from vtk.profiling.machine import device_name, versions
from vtk.profiling.measure import Plan
from vtk.profiling.memory import describe
from vtk.profiling.reference import FILES, Answers, Loader
from vtk.profiling.result import ProfileResult
from vtk.profiling.rounds import measure_group
from vtk.profiling.session import Session, supports
from vtk.profiling.work import Ceilings, Work, work_of
from vtk.runtime.backends.base import load_backend
from vtk.runtime.opening import open_source, open_with_notes
from vtk.runtime.run_conditions import openvino_precision
from vtk.runtime.source import Opening, Source

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

ONE_WAY = ("openvino", "aoti", "tensorrt")
"""Kinds of sources that only the back-end of that name runs."""

_RESIDENT = (
    "resident on the device, in the model's precision unless they are bytes; copies from the host are not in the "
    "times, for any back-end"
)
_COPIED = (
    "on the host, in the model's precision unless they are bytes; copies to the device and of the logits back are in "
    "the times of every back-end (one on the CPU has none)"
)
_ORDERS = {
    "interleaved": "batch sizes ascending; at each, the back-ends take turns window by window",
    "sequential": "one back-end after the other, batch sizes ascending, each warmed up and timed in one go",
}


def profile(
    source: "Openable",
    config: ProfileConfig | None = None,
    *,
    command: str = "",
    show_progress: bool = True,
    **opening: Unpack[Opening],
) -> ProfileResult:
    """Measure latency, throughput and memory per batch size and back-end.

    A wrong output, too little memory or an absent back-end of the default set is a row of the result, not an exception;
    `ProfileResult.exit_code` says what the command line would return. With ``config.out`` the reports are written.

    Args:
        source: a path, a timm name, a `Task`, a module in memory, or an open source.
        config: options.
        command: kept in the report.
        show_progress: a bar on a terminal, lines elsewhere.
        opening: how to open the source, see `vtk.open_source`.

    Raises:
        UsageError: a back-end that does not exist or does not run this kind of source.
        DataError: the source cannot be read, or ``out`` is not empty.
        UnavailableError: a device or back-end named in the options is not available.
    """
    config = config or ProfileConfig()
    expect(config, ProfileConfig, "profile")
    if config.on is not None:
        raise UsageError("`profile` measures batch sizes; for the search of `on` use `search_setups`")
    if config.img_sizes:
        raise UsageError("`profile` measures one source at one size; for several sizes use `profile_sizes`")
    with contextlib.ExitStack() as stack:
        if config.out is not None:
            from vtk.profiling.report import MARKS, write_reports

            require("matplotlib")
            stack.enter_context(open_folder(config.out, MARKS, command or "vtk profile", overwrite=config.overwrite))
        config = replace(config, threads=stack.enter_context(pinned(config.cpus, config.threads)))
        opened = open_with_notes(source, many=True, **opening)
        trust = opening.get("trust", False)
        reference = None if config.reference is None else open_source(config.reference, trust=trust)
        name = str(source) if isinstance(source, (str, Path)) else opened.name
        result = run(
            config, opened, load_backend, name=name, reference=reference, command=command, show_progress=show_progress
        )
        if config.out is not None:
            write_reports(result, config.out)
    return result


def run(
    config: ProfileConfig,
    source: Source,
    load: Loader,
    *,
    name: str = "",
    reference: Source | Answers | None = None,
    command: str = "",
    show_progress: bool = True,
) -> ProfileResult:
    """Measure an open ``source`` with the back-ends that ``load`` gives; `profile` without files."""
    device = resolve_device(config.device)
    auto = config.precision == "auto"
    if auto:
        config = replace(config, precision=source.facts.precision)  # type: ignore[arg-type]
    if not config.backends and source.kind in ONE_WAY:
        config = replace(config, backends=(source.kind,))  # nothing else runs it, so its absence is no row but the end
    names = config.backends or default_backends(device, source.kind)
    if config.precision == FP8:
        names = tuple(name for name in names if name in FP8_BACKENDS)
    before = torch.get_num_threads()
    threads = config.threads or before
    spec = source.card.input
    shape = (spec.in_chans, spec.height, spec.width)
    limits = find_ceilings(config, device, threads)
    torch.set_num_threads(threads)
    try:
        with Session(config, source, load, device, threads, reference, auto) as session:
            if auto and "openvino" in names:
                for note in openvino_precision(None)[1]:
                    console.say(note)
            session.prepare(names)
            count = max(LEAST_DISTINCT, min(DISTINCT, max(config.batch_sizes)))
            inputs = make_inputs(source, count, seed=config.seed, tasks=len(source.tasks))
            against = session.reference(inputs)
            plan = Plan(
                inputs, against.logits, against.kind, config.duration, config.stability / 100, config.h2d,
                against.probabilities,
            )  # fmt: skip
            groups = [list(names)] if config.order == "interleaved" else [[name] for name in names]
            total = len(names) * len(config.batch_sizes)
            with console.progress("profile", total, unit="cells", enabled=show_progress) as bar:
                backends: tuple[BackendResult, ...] = ()
                for group in groups:
                    if not session.stopped:
                        backends += tuple(measure_group(session, group, plan, bar.advance))
            if session.stopped and not any(backend.cells for backend in backends):
                raise KeyboardInterrupt
    finally:
        torch.set_num_threads(before)
    work = _work(source, shape)
    shown = centred(against.logits, half=False) if against.probabilities else against.logits
    repeated = ", repeated in larger batches" if max(config.batch_sizes) > DISTINCT else ""
    return ProfileResult(
        source=name or source.name,
        kind=source.kind,
        model=source.card.model.name,
        input_shape=shape,
        device=str(device),
        device_name=device_name(str(device)) + (f", cores {_cores(config)}" if config.cpus else ""),
        precision=config.precision,
        threads=threads,
        duration_s=config.duration,
        reference=against.described,
        inputs=f"{inputs.what}{repeated}, {_COPIED if config.h2d == 'in' else _RESIDENT}",
        order=_ORDERS[config.order],
        memory=describe(device, together=config.order == "interleaved" and len(names) > 1),
        remarks=(*remarks(shown, against.kind), *against.cautions),
        backends=tuple(_against(backend, str(device), config.precision, work, limits) for backend in backends),
        budget_ms=config.budget_ms,
        h2d=config.h2d,
        stability_pct=config.stability,
        work=work,
        ceilings=limits,
        stopped=session.stopped,
        versions=versions(),
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def default_backends(device: torch.device, kind: str = "") -> tuple[str, ...]:
    """Return the back-ends measured when none is named: those that fit a ``kind`` of source."""
    if kind in ONE_WAY:
        return (kind,)
    cuda = device.type == "cuda"
    names = ("eager", "compile", "fused", "ort-cuda" if cuda else "ort-cpu")
    return tuple(name for name in names if supports(name, kind))


def _cores(config: ProfileConfig) -> str:
    return show_cores(parse_cores(config.cpus or ""))


def find_ceilings(config: ProfileConfig, device: torch.device, threads: int) -> Ceilings | None:
    """Return what an earlier measurement of the device found; with ``config.ceilings`` measure now."""
    if not config.ceilings:
        return ceilings.stored(device, threads)
    found = ceilings.measure(device, threads)
    console.say(f"ceilings of {ceilings.key(device, threads)}: {ceilings.describe(found)}")
    return found


def _work(source: Source, shape: tuple[int, ...]) -> Work | None:
    """Count the work of what a source runs; a compiled library does not tell."""
    if source.kind == "onnx" and source.path is not None:
        from vtk.profiling.onnx_work import work_of_onnx

        return work_of_onnx(source.path, shape)
    return None if source.kind in FILES else work_of(source.model(), shape, len(source.card.classes))


def _against(
    backend: BackendResult, device: str, precision: str, work: Work | None, limits: Ceilings | None
) -> BackendResult:
    """Set every cell against the least time that the ceilings of the device allow."""
    if work is None or limits is None or backend.device != device:
        return backend
    if backend.arithmetic in DTYPES:
        precision = backend.arithmetic

    def share(cell: Cell) -> Cell:
        floor = work.floor_s(cell.batch, precision, limits)
        known = floor is not None and cell.typical_ms is not None
        return replace(cell, roofline=1000 * floor / cell.typical_ms) if known else cell  # type: ignore[operator]

    return replace(backend, cells=tuple(map(share, backend.cells)))
