"""Products of packed rows with the matrices of their tasks, one task after the other: what a CPU runs.

Adjacent tasks whose matrices are changes of one base go through the base as one product; each task's change is two
thin products of its own rows. Of a task with many rows in one call a sum of base and change takes less time than these:
it is made for that product alone.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.models.packed.low_rank import Change, LowRankMatrix, Matrix, base_of, whole

Stack = Tensor | Sequence[Matrix]
"""A tensor of every task: stacked along a new first axis, or as a sequence; matrices there may be of low rank."""
Layer = Mapping[str, Stack]
"""The weights of one attention module of every task, in the form of `own_weights`."""
Run = tuple[int, int, int]
"""Task, first row, row end."""
_MANY = 2.0
"""How many times the additions of a sum of base and change the two thin products must take before the sum is made."""


def linear(x: Tensor, w: Matrix, b: Tensor | None) -> Tensor:
    """Return x (n, K) times a task's matrix (F, K), plus b (F): (n, F), differentiable."""
    if not isinstance(w, LowRankMatrix):
        return F.linear(x, w, b)
    x = x if w.inputs is None else x * w.inputs
    y = F.linear(x, w.base, b)
    if w.rank:
        thin, tall = w.stacked(x.dtype)
        y = y + F.linear(F.linear(x, thin), tall)
    return y


def linear_by_runs(x: Tensor, w: Stack, b: Stack | None, runs: Sequence[Run]) -> Tensor:
    """Multiply runs of rows of x (T, K) by their tasks' matrices, without gradient.

    Each product writes into the result; concatenation would read and write all rows again.

    Args:
        x: (T, K).
        w: (F, K) of each task.
        b: (F,) of each task, or None.
        runs: in ascending order of rows.

    Returns:
        (T, F), 0 in rows of no run.
    """
    y, row = x.new_empty(len(x), w[0].shape[0]), 0
    for group in _of_one_base(w, runs):
        first, last = group[0][1], group[-1][2]
        y[row:first].zero_()
        _multiply(x, w, b, group, y)
        row = last
    y[row:].zero_()
    return y


def stacked(stack: Stack) -> Tensor:
    """Return a stack as one tensor, its matrices whole."""
    return stack if isinstance(stack, Tensor) else torch.stack([whole(m) for m in stack])


def _of_one_base(w: Stack, runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Yield adjacent runs whose products begin with one matrix."""
    group: list[Run] = []
    for run in runs:
        alone = group and (_summed(w, group[-1]) or _summed(w, run))
        if group and (alone or not (group[-1][2] == run[1] and base_of(w[group[-1][0]]) is base_of(w[run[0]]))):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _summed(w: Stack, run: Run) -> bool:
    """Return whether a run is so long that its task's change is added to the base, in types that lose nothing by it."""
    matrix = w[run[0]]
    if not isinstance(matrix, LowRankMatrix) or not matrix.rank or matrix.base.dtype.itemsize < 4:
        return False
    rows, columns = matrix.shape
    return (run[2] - run[1]) * (rows + columns) >= _MANY * rows * columns


def _multiply(x: Tensor, w: Stack, b: Stack | None, group: Sequence[Run], y: Tensor) -> None:
    """Write the products of runs of one base into their rows of y."""
    first, last = group[0][1], group[-1][2]
    summed = len(group) == 1 and _summed(w, group[0])
    matrix = (whole(w[group[0][0]]) if summed else base_of(w[group[0][0]])).t()
    inputs = [(i, j, m.inputs) for g, i, j in group if isinstance(m := w[g], LowRankMatrix) and m.inputs is not None]
    if inputs and not summed:  # a sum has them
        x = x.clone()
        for i, j, factors in inputs:
            x[i:j] *= factors
    lengths = [j - i for _, i, j in group]
    parts = y[first:last].split(lengths)
    if b is None:
        torch.mm(x[first:last], matrix, out=y[first:last])
    elif len(group) == 1:
        torch.addmm(whole(b[group[0][0]]), x[first:last], matrix, out=y[first:last])
    else:
        for (g, _, _), part in zip(group, parts, strict=True):
            part.copy_(whole(b[g]))
        y[first:last].addmm_(x[first:last], matrix)
    if summed:
        return
    for (g, _, _), rows, part in zip(group, x[first:last].split(lengths), parts, strict=True):
        if isinstance(m := w[g], LowRankMatrix):
            add_changes(rows, m, part)


def add_changes(x: Tensor, w: LowRankMatrix, y: Tensor) -> None:
    """Add to y (n, F) the products of x (n, K) with a matrix's changes, in place."""
    if w.thin is not None:
        y.addmm_(torch.mm(x, w.thin[0]), w.thin[1])
        return
    z: Tensor | None = None
    last: Change | None = None
    for change in w.changes:
        if not change.rank:
            continue
        a, b = change.values(x.dtype)
        if z is None or last is None or not change.reads_as(last):
            z = torch.mm(x[:, change.column : change.column + a.shape[1]], a.t())
        last = change
        y[:, change.row : change.row + len(b)].addmm_(z, b.t())
