"""Computes the rows of a task: its part of every stack, from its pack; and writes them as its file.

Factors are stored in fp16 by default. Each component of a matrix, a column of a times a row of b, is scaled by a power
of two so that both are of one magnitude, which changes no digit and keeps small ones from underflow.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from vtk.errors import DataError, UsageError
from vtk.packs.factors import Factors
from vtk.packs.load import Task
from vtk_export.tasks.factor_layout import COUNTS, DTYPES, FACTORED_TABLES, Layout
from vtk_export.tasks.index import METADATA

Rows = dict[str, Tensor]
"""Row of each stack, by its name; factors of the task's own ranks."""
_CLOSE = 1e-5


@dataclass(frozen=True)
class Changes:
    """What a task changed of its base.

    Attributes:
        factors: a (r, K) and b (F, r) of changed matrices, as they are stored, by the name of the parameter; of rank
            0, too.
        tensors: other tensors that differ from the base's, the classifiers, and biases and norms of layers that the
            pack holds.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    tensors: Mapping[str, Tensor]


def changes_of(
    task: Task, start: Mapping[str, Tensor], heads: Collection[str], dtype: torch.dtype, what: str
) -> Changes:
    """Return what a task changed.

    Args:
        task: its model holds the changes merged.
        start: tensors of the model as created from the base.
        heads: names of the classifiers.
        dtype: to store the factors in.
        what: names the task in messages.

    Raises:
        UsageError: the pack holds a matrix whole that it changed; or it starts from other values.
    """
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    model: Any = task.model
    for key, value in task.model.state_dict().items():
        where = key.rpartition(".")[0]
        if key in task.factors:
            factors[key] = _checked(key, start[key], value, task.factors[key], what)
        elif where in heads:
            tensors[key] = value
        elif not torch.equal(value, start[key]):
            linear = value.ndim == 2 and isinstance(model.get_submodule(where), nn.Linear)
            if not task.factors and linear:
                raise UsageError(
                    f"{what} is a dense pack, which holds `{key}` whole; make factors of it (`vtk tasks compress`), or "
                    "use --form files"
                )
            if linear or key in FACTORED_TABLES:
                factors[key] = _whole(start[key], value)
            else:
                tensors[key] = value
    stored = {key: tuple(part.to(dtype) for part in balanced(*pair)) for key, pair in factors.items()}
    return Changes(stored, tensors)  # type: ignore[arg-type]


def task_rows(layout: Layout, start: Mapping[str, Tensor], changes: Changes, what: str) -> Rows:
    """Return the rows of a task.

    Args:
        layout: of the file.
        start: tensors of the model as created from the base.
        changes: of the task.
        what: names the task in messages.

    Raises:
        UsageError: the task changed what has no stack.
    """
    held = {*layout.factored, *layout.tokens, *layout.vectors}
    for key in (*changes.factors, *changes.tensors):
        if key not in held and key.rpartition(".")[0] not in layout.heads:
            raise UsageError(f"{what} changed `{key}`, of which this file has no stack; export all tasks together")
    rows: Rows = {}
    kinds = {stack.name: DTYPES[stack.dtype] for stack in layout.stacks}
    for key in layout.factored:
        name, table = key.removesuffix(".weight"), key in layout.tables
        flat = start[key].reshape(-1, start[key].shape[-1]).to(kinds[f"{name}.a"])
        a, b = changes.factors.get(key, (flat[:0], flat[:, :0]))
        rows[f"{name}.a"], rows[f"{name}.b"] = (a, b) if table else (a.t(), b.t())
    for key in layout.tokens:
        rows[key] = changes.tensors.get(key, start[key])[0]
    for key in layout.vectors:
        rows[key] = changes.tensors.get(key, start[key])
    for head in layout.heads:
        weight, bias = changes.tensors[f"{head}.weight"], changes.tensors.get(f"{head}.bias")
        rows[f"{head}.weight"] = weight.t()
        rows[f"{head}.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
    return {name: row.detach().clone(memory_format=torch.contiguous_format) for name, row in rows.items()}


def _checked(key: str, start: Tensor, value: Tensor, change: Factors, what: str) -> tuple[Tensor, Tensor]:
    """Return a pack's factors a (r, K) and b (F, r) in fp32."""
    flat, base = (t.reshape(-1, t.shape[-1]) for t in (value, start))
    if not change.rank:
        return flat[:0], flat[:, :0]
    a, b = change.values(torch.float32)
    error = (base + b @ a - flat).abs().max()
    if not error <= _CLOSE * max(1.0, flat.abs().max().item()):
        raise UsageError(f"{what} changed `{key}` from other values than those of this file's base; export it apart")
    return a, b


def _whole(start: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors of full rank: the difference itself, and the identity."""
    flat = (value - start).reshape(-1, value.shape[-1])
    return (flat, torch.eye(len(flat))) if len(flat) <= flat.shape[1] else (torch.eye(flat.shape[1]), flat)


def balanced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors a (r, K), b (F, r) of the same product whose components are of one magnitude each."""
    if not len(a):
        return a, b
    large = a.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    small = b.abs().amax(0).clamp(min=torch.finfo(torch.float32).tiny)
    power = torch.exp2(((small.log2() - large.log2()) / 2).round().clamp(-60, 60))
    return a * power[:, None], b / power


def stored_state(start: Mapping[str, Tensor], changes: Changes) -> dict[str, Tensor]:
    """Return the changed matrices as their stored factors make them, computed in fp32."""
    return {
        key: start[key] + (b.float() @ a.float()).reshape(start[key].shape) for key, (a, b) in changes.factors.items()
    }


def n_bytes(rows: Mapping[str, Tensor]) -> int:
    """Return the bytes of rows."""
    return sum(row.nbytes for row in rows.values())


def padded_bytes(layout: Layout, tasks: Sequence[Rows]) -> int:
    """Return the bytes by which the stacks of these tasks exceed their rows."""
    sizes = open_sizes(layout, tasks)
    whole = sum(
        int(np.prod([sizes[a] if isinstance(a, str) else a for a in stack.axes])) * DTYPES[stack.dtype].itemsize
        for stack in layout.stacks if stack.name != COUNTS
    )  # fmt: skip
    return whole * len(tasks) - sum(map(n_bytes, tasks))


def open_sizes(layout: Layout, tasks: Sequence[Rows]) -> dict[str, int]:
    """Return the size of each open axis in stacks of these tasks: the largest, at least 1."""
    sizes: dict[str, int] = {}
    for stack in layout.stacks:
        for i, axis in enumerate(stack.axes):
            if isinstance(axis, str):
                sizes[axis] = max(1, sizes.get(axis, 1), *(rows[stack.name].shape[i] for rows in tasks))
    return sizes


def ranks_of(layout: Layout, rows: Rows) -> dict[str, int]:
    """Return the rank of a task's change of each matrix, by the name of the parameter."""
    return {
        key: rows[f"{key.removesuffix('.weight')}.a"].shape[0 if key in layout.tables else 1] for key in layout.factored
    }


def write_rows(path: Path, layout: Layout, rows: Rows, classes: Sequence[str]) -> str:
    """Write the file of a task and return its sha256.

    Its metadata names the layout that it fits, the classes, and the sha256 of its values, by which a file that is half
    copied is noticed.

    Raises:
        DataError: it cannot be written.
    """
    plain = save(rows)
    body = plain[8 + int.from_bytes(plain[:8], "little") :]
    about = {"layout": layout.digest, "classes": list(classes), "sha256": hashlib.sha256(body).hexdigest()}
    data = save(rows, metadata={METADATA: json.dumps(about)})
    try:
        path.write_bytes(data)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    return hashlib.sha256(data).hexdigest()
