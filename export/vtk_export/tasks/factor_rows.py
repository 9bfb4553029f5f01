"""Computes the rows of a task: its part of every stack, from its pack; and writes them as its file.

Factors are stored in fp16 by default. Each component of a matrix, a column of a times a row of b, is scaled by a power
of two so that both are of one magnitude, which changes no digit and keeps small ones from underflow.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from vtk.errors import DataError, UsageError
from vtk.packs.factors import Factors
from vtk_export.tasks.factor_layout import COUNTS, DTYPES, Layout

Rows = dict[str, Tensor]
"""Row of each stack, by its name; factors of the task's own ranks."""
METADATA = "vtk.factors"
_CLOSE = 1e-5


def task_rows(
    layout: Layout, start: Mapping[str, Tensor], state: Mapping[str, Tensor], factors: Mapping[str, Factors], what: str
) -> Rows:
    """Return the rows of a task.

    Args:
        layout: of the file.
        start: tensors of the model as created from the base.
        state: tensors of the task's model.
        factors: of the pack, by the names of parameters.
        what: names the pack in messages.

    Raises:
        UsageError: the task changed what has no stack.
    """
    rows: Rows = {}
    kinds = {stack.name: DTYPES[stack.dtype] for stack in layout.stacks}
    for key in layout.factored:
        name, table = key.removesuffix(".weight"), key in layout.tables
        a, b = balanced(*_change(key, start[key], state[key], factors.get(key), what))
        kind = kinds[f"{name}.a"]
        rows[f"{name}.a"] = (a if table else a.t()).to(kind).contiguous()
        rows[f"{name}.b"] = (b if table else b.t()).to(kind).contiguous()
    for key in layout.tokens:
        rows[key] = state[key][0]
    for key in layout.vectors:
        rows[key] = state[key]
    for head in layout.heads:
        weight = state[f"{head}.weight"]
        bias = state.get(f"{head}.bias")
        rows[f"{head}.weight"] = weight.t().contiguous()
        rows[f"{head}.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
    held = {*layout.factored, *layout.tokens, *layout.vectors}
    for key, value in state.items():
        if key not in held and key.rpartition(".")[0] not in layout.heads and not torch.equal(value, start[key]):
            raise UsageError(f"{what} changed `{key}`, of which this file has no stack; export all tasks together")
    return {name: row.detach().contiguous() for name, row in rows.items()}


def _change(key: str, start: Tensor, value: Tensor, change: Factors | None, what: str) -> tuple[Tensor, Tensor]:
    """Return a (r, K) and b (F, r) in fp32: those of the pack, or of all ranks where it holds the matrix whole."""
    flat, base = (t.reshape(-1, t.shape[-1]) for t in (value, start))
    rank = 0 if change is None else change.rank
    if change is not None:
        a, b = (
            change.values(torch.float32) if rank else (flat.new_empty(0, flat.shape[1]), flat.new_empty(len(flat), 0))
        )
        error = (base + b @ a - flat).abs().max()
        if not error <= _CLOSE * max(1.0, flat.abs().max().item()):
            raise UsageError(
                f"{what} changed `{key}` from other values than those of this file's base; export it apart"
            )
        return a, b
    difference = flat - base
    if not difference.any():
        return flat.new_empty(0, flat.shape[1]), flat.new_empty(len(flat), 0)
    # the difference itself is one factor and the identity the other: exact, of full rank
    if len(flat) <= flat.shape[1]:
        return difference, torch.eye(len(flat))
    return torch.eye(flat.shape[1]), difference


def balanced(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors a (r, K), b (F, r) of the same product whose components are of one magnitude each."""
    if not len(a):
        return a, b
    large = a.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    small = b.abs().amax(0).clamp(min=torch.finfo(torch.float32).tiny)
    power = torch.exp2(((small.log2() - large.log2()) / 2).round().clamp(-60, 60))
    return a * power[:, None], b / power


def rounded_state(layout: Layout, start: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """Return the parameters that the rows stand for, as they are stored: what the graph computes with."""
    found: dict[str, Tensor] = {}
    for key in layout.factored:
        name = key.removesuffix(".weight")
        a, b = rows[f"{name}.a"].float(), rows[f"{name}.b"].float()
        change = b @ a if key in layout.tables else (a @ b).t()
        found[key] = start[key] + change.reshape(start[key].shape)
    return found


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


def read_about(path: Path) -> dict[str, Any]:
    """Return the metadata of the file of a task."""
    from vtk.formats import read_header

    found: dict[str, Any] = json.loads(read_header(path)["__metadata__"][METADATA])
    return found
