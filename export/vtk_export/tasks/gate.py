"""Verifies an export of several tasks: each task's logits against its model in PyTorch and against `TaskBank`."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vtk import console
from vtk.errors import DataError, VerificationError
from vtk.runtime.backends.base import Backend, load_backend
from vtk.runtime.export_facts import Facts
from vtk.runtime.onnx_file import open_onnx
from vtk_export.gate.limits import LIMITS
from vtk_export.gate.neighbours import Dependence, black_image, check_dependence, measure, rounding
from vtk_export.gate.structure import Axes, verify_graph, verify_structure
from vtk_export.gate.verify import GateRow, check_rows, compare
from vtk_export.tasks.members import Member

BATCHES = (1, 2, 3)
"""Batch sizes that files with a dynamic batch are run with."""


@dataclass(frozen=True)
class TaskRow:
    """One comparison: a task's images of one batch, in both sessions, with one reference.

    Attributes:
        file: that was run.
        task: whose logits were compared, its own classes only.
        against: ``torch`` or ``bank``.
        batch: images in the call, those of other tasks included.
        row: errors and classes.
    """

    file: str
    task: str
    against: str
    batch: int
    row: GateRow

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values; ``images`` are those of the task."""
        values = dataclasses.asdict(self.row)
        return {"file": self.file, "task": self.task, "against": self.against, "batch": self.batch,
                "images": values.pop("batch"), **values, "passed": self.row.passed}  # fmt: skip


def verify_file(
    path: Path, member: Member, *, opset: int, ir_version: int, static_batch: int | None, threads: int | None,
    names: dict[str, str],
) -> list[TaskRow]:  # fmt: skip
    """Check a task's own file, of which ``names`` are the names that differ from the toolkit's.

    Raises:
        VerificationError: its structure is not what was asked for, or it cannot be run. Wrong values are in the rows.
    """
    facts = Facts(names=names)
    verify_structure(path, member.card, opset=opset, static_batch=static_batch, ir_version=ir_version, facts=facts)
    sessions = _sessions(path, threads)
    rows, start = [], 0
    try:
        for batch in BATCHES if static_batch is None else (static_batch,):
            part = slice(start, start + batch)
            found = [_run(session, path, member.images[part])["logits"] for session in sessions]
            rows += _rows(path, member, batch, part, found)
            start += batch
    finally:
        _close(sessions)
    return rows


def verify_gathered(
    path: Path, members: Sequence[Member], *, opset: int, ir_version: int, static_batch: int | None,
    threads: int | None, names: dict[str, str],
) -> list[TaskRow]:  # fmt: skip
    """Check the file of all tasks on mixed batches, its padding, and numbers that no task has.

    Raises:
        VerificationError: as `verify_file`; or padding, number of classes or unknown tasks are not as they should be.
    """
    spec = members[0].card.input
    most = max(len(m.card.classes) for m in members)
    inputs: dict[str, tuple[str, Axes]] = {
        "pixel_values": ("FLOAT", (spec.in_chans, *spec.size)),
        "task": ("INT32", ()),
    }
    outputs: dict[str, tuple[str, Axes]] = {"logits": ("FLOAT", (most,)), "num_classes": ("INT32", ())}
    inputs, outputs = ({names.get(term, term): entry for term, entry in each.items()} for each in (inputs, outputs))
    verify_graph(path, inputs, outputs, opset=opset, static_batch=static_batch, ir_version=ir_version)
    sessions = _sessions(path, threads)
    counts = torch.tensor([len(m.card.classes) for m in members], dtype=torch.int32)
    width, lowest = int(counts.max()), torch.finfo(torch.float32).min
    rows: list[TaskRow] = []
    try:
        for places in mixed(members, static_batch):
            images = torch.stack([members[t].images[i] for t, i in places])
            task = torch.tensor([t for t, _ in places], dtype=torch.int32)
            results = [_run(session, path, images, task) for session in sessions]
            for found in results:
                if found["logits"].shape != (len(places), width):
                    raise VerificationError(f"{path.name} gives logits {tuple(found['logits'].shape)}, expected "
                                            f"{(len(places), width)}")  # fmt: skip
                if found["num_classes"].tolist() != counts[task].tolist():
                    raise VerificationError(f"{path.name} gives num_classes {found['num_classes'].tolist()} for the "
                                            f"tasks {task.tolist()}, expected {counts[task].tolist()}")  # fmt: skip
                if not bool((found["logits"][torch.arange(width) >= counts[task][:, None]] == lowest).all()):
                    raise VerificationError(f"{path.name}: logits behind a task's classes are not {lowest}")
            for t in dict.fromkeys(t for t, _ in places):
                at = [k for k, (other, _) in enumerate(places) if other == t]
                found_logits = [result["logits"][at, : counts[t]] for result in results]
                rows += _rows(path, members[t], len(places), [places[k][1] for k in at], found_logits)
        _check_unknown(path, sessions, members, static_batch)
    finally:
        _close(sessions)
    return rows


def measure_neighbours(
    path: Path, members: Sequence[Member], *, gathered: bool, static_batch: int | None, threads: int | None
) -> Dependence:
    """Return how far an image's logits depend on the other images of its call.

    Args:
        path: a file that was verified.
        members: the tasks that it has; of the gathered file all.
        gathered: images come with the number of their task; the neighbours are then of another one.
        static_batch: fixed batch size, None for any.
        threads: CPU threads.

    Raises:
        VerificationError: they depend on them, or NaN is answered with numbers.
    """
    own = members[:2] if gathered else members[:1]
    classes = min(len(member.card.classes) for member in own)
    session, other = _sessions(path, threads)
    other.close()

    def run(rows: Tensor) -> dict[str, Tensor]:
        task = torch.zeros(len(rows), dtype=torch.int32)
        task[1:2] = len(own) - 1
        return {"logits": _run(session, path, rows, task if gathered else None)["logits"][:, :classes]}

    try:
        found = measure(run, members[0].images, static_batch=static_batch, black=black_image(members[0].card.input),
                        names=("logits",))  # fmt: skip
    finally:
        session.close()
    try:
        check_dependence(found, rounding(LIMITS["fp32"]))
    except VerificationError as error:
        raise VerificationError(f"{path.name}: {error}") from error
    return found


def print_task_rows(rows: Sequence[TaskRow]) -> None:
    """Print the worst of each file and task."""
    cells = []
    for key in dict.fromkeys((r.file, r.task) for r in rows):
        mine = [r for r in rows if (r.file, r.task) == key]
        errors = {a: max(_worst(r.row) for r in mine if r.against == a) for a in ("torch", "bank")}
        bound = min(r.row.bound for r in mine)
        direct = [r.row for r in mine if r.against == "torch"]
        cells.append((*key, f"{errors['torch']:.1e}", f"{errors['bank']:.1e}", f"{bound:.1e}",
                      f"{sum(r.agreed for r in direct)} of {sum(r.compared for r in direct)}",
                      sum(r.excluded for r in direct)))  # fmt: skip
    columns = ("file", "task", "vs PyTorch", "vs bank", "bound", "argmax agreed", "excluded")
    console.table(
        "ONNX Runtime on the CPU against PyTorch and a bank, fp32: largest errors", columns, cells, left=(0, 1)
    )


def check_task_rows(rows: Sequence[TaskRow]) -> None:
    """Raise for the first row that failed.

    Raises:
        VerificationError: names file, task and reference.
    """
    for row in rows:
        try:
            check_rows([row.row])
        except VerificationError as error:
            raise VerificationError(f"{row.file}, task `{row.task}` against {row.against}: {error}") from error


def mixed(
    members: Sequence[Member], static_batch: int | None, most: int | None = None
) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of (task, image), until every task was in one; neighbours are of different tasks.

    Args:
        members: the tasks.
        static_batch: fixed batch size, None for any.
        most: images of a batch; by default one more than there are tasks.
    """
    counts = [0] * len(members)
    turn = len(members)
    last = min(len(members) + 1, most or len(members) + 1)
    sizes = [*BATCHES, *[last] * -(-len(members) // last)]
    if static_batch is not None:
        sizes = [static_batch] * -(-len(members) // static_batch)
    for size in sizes:
        batch = []
        for _ in range(size):
            turn = (turn - 1) % len(members)  # downwards: an order that a mistake is unlikely to be in
            batch.append((turn, counts[turn] % len(members[turn].images)))
            counts[turn] += 1
        yield batch


def _rows(path: Path, member: Member, batch: int, at: slice | list[int], found: Sequence[Tensor]) -> list[TaskRow]:
    references = {"torch": member.torch[at], "bank": member.bank[at]}
    return [
        TaskRow(path.name, member.name, against, batch, compare(expected, found))
        for against, expected in references.items()
    ]


def _check_unknown(
    path: Path, sessions: Sequence[Backend], members: Sequence[Member], static_batch: int | None
) -> None:
    wrong = [-1, len(members), -len(members), 2**31 - 1, -(2**31)]
    size = static_batch or len(wrong)
    task = torch.tensor((wrong * size)[:size], dtype=torch.int32)
    images = members[0].images[:1].expand(size, -1, -1, -1)
    for session in sessions:
        found = _run(session, path, images, task)
        if bool(found["num_classes"].any()) or not bool(found["logits"].isnan().all()):
            raise VerificationError(f"{path.name} accepts task numbers {task.tolist()}, which no task has")


def _sessions(path: Path, threads: int | None) -> list[Backend]:
    sessions: list[Backend] = []
    try:
        source = open_onnx(path, many=True)
        for optimize in (True, False):
            sessions.append(load_backend("ort-cpu", source, threads=threads, optimize=optimize))
    except DataError as error:
        _close(sessions)
        raise VerificationError(str(error)) from error
    return sessions


def _run(session: Backend, path: Path, images: Tensor, task: Tensor | None = None) -> dict[str, Tensor]:
    inputs = {"pixel_values": images} if task is None else {"pixel_values": images, "task": task}
    try:
        return dict(session.run(inputs))
    except Exception as error:  # onnxruntime has no common base class for its errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise VerificationError(f"{path.name} does not run with a batch of {len(images)}: {reason}") from error


def _close(sessions: Sequence[Backend]) -> None:
    for session in sessions:
        session.close()


def _worst(row: GateRow) -> float:
    return max(row.error, row.error_plain, key=lambda e: (e != e, e))
