"""Verifies a folder of factors as a client uses it: each task's logits, tasks that come and go, numbers of no task."""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk import console
from vtk.errors import VerificationError
from vtk_export.gate.limits import LIMITS
from vtk_export.gate.neighbours import Dependence, black_image, check_dependence, measure, rounding
from vtk_export.gate.structure import Axes, verify_graph
from vtk_export.gate.verify import compare
from vtk_export.tasks.factor_layout import LOWEST, TASKS, Layout
from vtk_export.tasks.gate import TaskRow, mixed
from vtk_export.tasks.members import Member

_SHOWN = 16
MOST = 16
"""Images of a call, however many tasks there are."""
_TYPES = {"fp32": "FLOAT", "fp16": "FLOAT16", "int32": "INT32"}


def open_model(folder: Path, code: str, **options: Any) -> Any:
    """Return the folder's `FactorModel`, made by the code beside it, as a client without vtk would.

    Raises:
        VerificationError: it does not open.
    """
    module = types.ModuleType(code)
    source = folder / f"{code}.py"
    try:
        # imported it would leave compiled code in the folder
        exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), vars(module))
        return module.FactorModel(folder, **options)
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise VerificationError(f"{folder.name} does not open: {_line(error)}") from error


def verify_factors(
    path: Path,
    models: Sequence[Any],
    layout: Layout,
    members: Sequence[Member],
    stored: Mapping[str, Tensor],
    *,
    opset: int,
    ir_version: int,
    static_batch: int | None,
    names: Mapping[str, str],
) -> list[TaskRow]:
    """Check the graph and every task, in mixed calls.

    Args:
        path: of the graph.
        models: `FactorModel` of the folder, with graph optimisations on and off.
        layout: of the stacks.
        members: the tasks.
        names: of inputs and outputs that differ from the toolkit's.
        stored: logits of each task's images with the factors as they are stored, which the graph has to give.
        opset, ir_version, static_batch: as they were asked for.

    Returns:
        Comparisons with ``stored``, which bound the graph's error, and with the pack in torch and in a bank, which say
        what the rounding of the factors costs.

    Raises:
        VerificationError: the structure, padding, numbers of classes, or answers to numbers that no task has are not as
            they should be. Wrong logits are in the rows.
    """
    spec = members[0].card.input
    inputs: dict[str, tuple[str, Axes]] = {
        "pixel_values": ("FLOAT", (spec.in_chans, *spec.size)),
        "task": ("INT32", ()),
    }
    outputs: dict[str, tuple[str, Axes]] = {"logits": ("FLOAT", ("classes",)), "num_classes": ("INT32", ())}
    whole: dict[str, tuple[str, Axes]] = {s.name: (_TYPES[s.dtype], (TASKS, *s.axes)) for s in layout.stacks}
    inputs, outputs = ({names.get(term, term): entry for term, entry in each.items()} for each in (inputs, outputs))
    verify_graph(path, inputs, outputs, opset=opset, static_batch=static_batch, ir_version=ir_version, whole=whole)
    counts = np.array([len(member.card.classes) for member in members], np.int32)
    halves = any(stack.dtype == "fp16" for stack in layout.stacks)
    rows: list[TaskRow] = []
    for places in mixed(members, static_batch, most=MOST):
        images = np.stack([members[t].images[i].numpy() for t, i in places])
        task = np.array([t for t, _ in places], np.int32)
        found = [_run(model, path, images, task) for model in models]
        for logits, number in found:
            _check_padding(path, logits, number, counts[task], int(counts.max()))
        for t in dict.fromkeys(t for t, _ in places):
            at = [k for k, (other, _) in enumerate(places) if other == t]
            own = [places[k][1] for k in at]
            results = [torch.from_numpy(logits[at, : counts[t]]) for logits, _ in found]
            member = members[t]
            for against, expected in (("stored", stored[member.name]), ("torch", member.torch), ("bank", member.bank)):
                limits = LIMITS["fp16" if halves and against != "stored" else "fp32"]
                row = compare(expected[own], results, limits)
                rows.append(TaskRow(path.name, member.name, against, len(places), row))
    for model in models:
        _check_unknown(path, model, members[0].images[:1].numpy(), len(members))
        _check_change(path, model, members)
    return rows


def measure_neighbours(path: Path, model: Any, members: Sequence[Member], static_batch: int | None) -> Dependence:
    """Return how far an image's logits depend on the other images of its call, which are of another task.

    Raises:
        VerificationError: they depend on them, or NaN is answered with numbers.
    """
    own = members[:2]
    classes = min(len(member.card.classes) for member in own)

    def run(rows: Tensor) -> dict[str, Tensor]:
        task = np.zeros(len(rows), np.int32)
        task[1:2] = len(own) - 1
        return {"logits": torch.from_numpy(_run(model, path, rows.numpy(), task)[0][:, :classes])}

    found = measure(run, members[0].images, static_batch=static_batch, black=black_image(members[0].card.input),
                    names=("logits",))  # fmt: skip
    try:
        check_dependence(found, rounding(LIMITS["fp32"]))
    except VerificationError as error:
        raise VerificationError(f"{path.name}: {error}") from error
    return found


def print_factor_rows(rows: Sequence[TaskRow]) -> None:
    """Print the worst of each task, of very many tasks the worst ones."""
    cells = []
    for task in dict.fromkeys(row.task for row in rows):
        mine = {a: [r.row for r in rows if r.task == task and r.against == a] for a in ("stored", "torch", "bank")}
        errors = {a: max(max(r.error, r.error_plain) for r in found) for a, found in mine.items()}
        direct = mine["torch"]
        cells.append((errors["torch"], (
            task, f"{errors['stored']:.1e}", f"{min(r.bound for r in mine['stored']):.1e}", f"{errors['torch']:.1e}",
            f"{errors['bank']:.1e}", f"{min(r.cosine for r in direct):.6f}",
            f"{sum(r.agreed for r in direct)} of {sum(r.compared for r in direct)}", sum(r.excluded for r in direct),
        )))  # fmt: skip
    columns = (
        "task",
        "vs stored factors",
        "bound",
        "vs PyTorch",
        "vs bank",
        "least cosine",
        "argmax agreed",
        "excluded",
    )
    shown = sorted(cells, key=lambda cell: -cell[0])[:_SHOWN] if len(cells) > _SHOWN else cells
    title = "ONNX Runtime on the CPU against PyTorch and a bank, fp32: largest errors"
    console.table(title, columns, [line for _, line in shown], left=(0,))
    if len(shown) < len(cells):
        console.say(f"{len(cells) - len(shown)} more tasks have smaller errors")


def _check_padding(path: Path, logits: np.ndarray, number: np.ndarray, counts: np.ndarray, width: int) -> None:
    if logits.shape != (len(counts), width):
        raise VerificationError(f"{path.name} gives logits {logits.shape}, expected {(len(counts), width)}")
    if number.tolist() != counts.tolist():
        raise VerificationError(f"{path.name} gives num_classes {number.tolist()}, expected {counts.tolist()}")
    if not (logits[np.arange(width) >= counts[:, None]] == np.float32(LOWEST)).all():
        raise VerificationError(f"{path.name}: logits behind a task's classes are not {LOWEST}")


def _check_unknown(path: Path, model: Any, image: np.ndarray, tasks: int) -> None:
    wrong = np.array([-1, tasks, -tasks, 2**31 - 1, -(2**31)], np.int32)
    logits, number = _run(model, path, np.repeat(image, len(wrong), 0), wrong)
    if number.any() or not np.isnan(logits).all():
        raise VerificationError(f"{path.name} accepts task numbers {wrong.tolist()}, which no task has")


def _check_change(path: Path, model: Any, members: Sequence[Member]) -> None:
    """Remove a task and add it again: its slot must be empty in between, and nothing else may change."""
    first, image = members[0], members[0].images[:1].numpy()
    images = {member.name: image for member in members[:2]}
    before = model.run(images)
    model.remove(first.name)
    logits, number = _run(model, path, image, np.zeros(1, np.int32))
    rest = model.run({name: image for name in images if name != first.name})
    model.add(first.name, path.parent / model.layout["tasks"][first.name]["file"])
    after = model.run(images)
    if number.any() or not np.isnan(logits).all():
        raise VerificationError(f"{path.name} answers for `{first.name}` after it was removed")
    for found in (rest, after):
        for name, logits in found.items():
            if not np.allclose(logits, before[name], rtol=0, atol=1e-4 * np.abs(before[name]).max()):
                raise VerificationError(f"{path.name}: `{name}` changed when `{first.name}` was removed and added")


def _run(model: Any, path: Path, images: np.ndarray, task: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    try:
        found: tuple[np.ndarray, np.ndarray] = model.run_slots(images, task)
        return found
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise VerificationError(f"{path.name} does not run with a batch of {len(images)}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
