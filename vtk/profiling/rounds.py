"""Measures several back-ends interleaved: at each batch size they take turns, window by window.

So a machine that gets warmer, or busier, does the same to all of them; measured one after the other, the last one would
pay for it alone.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import torch

from vtk.errors import UnavailableError, UsageError, VerificationError, VtkError
from vtk.profiling.calls import first_line
from vtk.profiling.cells import BackendResult, Cell
from vtk.profiling.measure import CellRun, Plan
from vtk.profiling.memory import Holdings, available_bytes, is_out_of_memory
from vtk.profiling.session import Session
from vtk.runtime.backends.base import Backend

Advance = Callable[[int, str], None]


@dataclass
class _Member:
    """A back-end of a group: loaded, or with the reason why not in ``result``.

    ``unfit`` is the refusal of one that nobody named and that does not run this source: it is no row.
    """

    result: BackendResult
    backend: Backend | None = None
    cells: list[Cell] = field(default_factory=list)
    unfit: UsageError | None = None

    @property
    def name(self) -> str:
        return self.result.name

    def give_up(self, error: Exception, *, named: bool) -> None:
        """Turn an error into a row, or raise it.

        Args:
            error: of loading or running.
            named: the user asked for this back-end by name, so its absence is the command's failure.
        """
        if isinstance(error, VerificationError):
            status, reason = "mismatch", str(error)
        elif isinstance(error, UsageError) and not named:
            self.unfit, status, reason = error, "unavailable", str(error)
        elif isinstance(error, UnavailableError) and not named:
            status, reason = "unavailable", str(error)
        elif not isinstance(error, VtkError) and is_out_of_memory(error):
            status, reason = "oom", f"out of memory while loading: {first_line(error)}"
        else:
            raise error
        self.result = replace(self.result, status=status, reason=reason)  # type: ignore[arg-type]
        self.backend = None


def measure_group(session: Session, names: Sequence[str], plan: Plan, advance: Advance) -> list[BackendResult]:
    """Measure back-ends that are loaded together, batch sizes ascending; one name measures it alone.

    Args:
        session: loads them.
        names: in the order of the result.
        plan: of every cell.
        advance: told of each finished cell.
    """
    sizes = sorted(session.config.batch_sizes)
    named = bool(session.config.backends)
    holdings = Holdings(session.device)
    members = [_Member(BackendResult(name, prepare_s=session.prepare_s(name))) for name in names]
    with ExitStack() as stack:
        try:
            for member in members:
                _load(session, member, stack, holdings, named)
            for size in sizes:
                _measure_size(session, members, size, plan, holdings, named)
                for member in members:
                    advance(1, f"{member.name} batch {size}")
        except KeyboardInterrupt:
            # an hour of measurements is kept; a cell that was not compared again afterwards is not
            session.stopped = True
        for member in members:
            member.backend = None  # closed with the stack; nothing else may hold its weights
    if all(member.unfit for member in members) and not session.stopped:
        raise members[0].unfit  # type: ignore[misc]
    return [_result(member) for member in members if member.unfit is None]


def _measure_size(
    session: Session, members: Sequence[_Member], size: int, plan: Plan, holdings: Holdings, named: bool
) -> None:
    """Measure one batch size with all back-ends that are loaded."""
    turns: list[tuple[_Member, CellRun]] = []
    for member in members:
        if member.backend is not None:
            _begin(member, size, plan, holdings, turns, named, session.file_of(member.name))
    _take_turns(turns, named)
    for member, run in turns:
        try:
            member.cells.append(run.finish())
        except VtkError as error:
            member.give_up(error, named=named)


def _load(session: Session, member: _Member, stack: ExitStack, holdings: Holdings, named: bool) -> None:
    try:
        with holdings.charge(member.name):
            backend = stack.enter_context(session.loaded(member.name))
    except (VtkError, MemoryError, RuntimeError) as error:
        member.give_up(error, named=named)
        return
    # a compiler that met several batch sizes would make one program for all of them, and time that
    compiles = hasattr(backend, "reset") or bool(getattr(backend, "compiles", False))
    member.result = replace(
        member.result, provider=backend.provider, device=str(backend.device), compiles=compiles,
        arithmetic=getattr(backend, "arithmetic", ""),
    )  # fmt: skip
    member.backend = backend


def _begin(
    member: _Member, size: int, plan: Plan, holdings: Holdings, turns: list[tuple[_Member, CellRun]], named: bool,
    file: Path | None,
) -> None:  # fmt: skip
    """Prepare a cell and give it a place among the turns, or say why it is not measured."""
    backend = member.backend
    assert backend is not None
    if full := next((c.batch for c in member.cells if c.status == "oom"), None):
        member.cells.append(Cell(size, "skipped", f"not tried: batch {full} already ran out of memory"))
        return
    if shortage := predicted_shortage(member.cells, size, backend.device):
        member.cells.append(Cell(size, "oom", f"not tried: {shortage}"))
        return
    if member.cells and (reset := getattr(backend, "reset", None)) is not None:
        with holdings.charge(member.name):
            reset()
    run = CellRun(backend, size, plan, holdings, file)
    try:
        run.prepare()
    except VtkError as error:
        member.give_up(error, named=named)
        return
    turns.append((member, run))


def _take_turns(turns: list[tuple[_Member, CellRun]], named: bool) -> None:
    """Give every unfinished cell a window in each round; each round begins with another one."""
    for number in count():
        waiting = [(member, run) for member, run in turns if not run.over and member.backend is not None]
        if not waiting:
            return
        first = number % len(waiting)
        for member, run in waiting[first:] + waiting[:first]:
            try:
                run.window(alone=len(waiting) == 1)
            except VtkError as error:
                member.give_up(error, named=named)


def predicted_shortage(cells: list[Cell], batch: int, device: torch.device) -> str:
    """Say why ``batch`` would not fit, judging by how activations grew over two smaller batches; empty if it should.

    Needed on a CPU: Linux does not refuse memory, it kills the process that uses it.
    """
    known = [(c.batch, c.activation_bytes) for c in cells if c.status == "ok" and c.activation_bytes is not None]
    if device.type != "cpu" or len(known) < 2:
        return ""
    (small, low), (large, high) = known[-2], known[-1]
    more = int((high - low) / (large - small) * (batch - large)) + high
    free = available_bytes(device)
    if more <= free:
        return ""
    return f"its activations would take about {more / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"


def _result(member: _Member) -> BackendResult:
    measured = member.result.status == "measured"
    return replace(member.result, cells=tuple(member.cells) if measured else ())
