"""Products of packed rows with matrices of low-rank changes, against the merged matrices in fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vtk.models.packed.low_rank import Change, LowRankMatrix, whole
from vtk.models.packed.products import linear, linear_by_runs, stacked

F, K = 7, 5


def change(generator: torch.Generator, rank: int, rows: int = F, columns: int = K, **more: object) -> Change:
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((rank, columns), (rows, rank)))
    return Change(a, b, **more)  # type: ignore[arg-type]


def formula(w: LowRankMatrix) -> Tensor:
    """Σ over components of outer products, written out."""
    found = w.base.clone()
    for c in w.changes:
        for j in range(c.rank):
            a, b = c.a[j].double(), c.b[:, j].double()
            a = a if c.inputs is None else a * c.inputs
            b = b if c.outputs is None else b * c.outputs
            s = 1.0 if c.scale is None else float(c.scale[j])
            found[c.row : c.row + len(b), c.column : c.column + len(a)] += s * torch.outer(b, a)
    return found if w.inputs is None else found * w.inputs


@given(
    tasks=st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 9), st.booleans()), min_size=1, max_size=6),
    gap=st.integers(0, 2),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_runs_of_tasks_of_any_rank_are_their_merged_matrices(
    tasks: list[tuple[int, int, bool]], gap: int, bias: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(F, K, generator=g, dtype=torch.float64)
    matrices: list[Tensor | LowRankMatrix] = []
    runs, row = [], gap
    for i, (rank, count, scaled) in enumerate(tasks):  # rank -1: a matrix of its own
        factors = torch.randn(K, generator=g, dtype=torch.float64) if scaled else None
        own = LowRankMatrix(base, (change(g, max(rank, 0)),), factors)
        matrices.append(torch.randn(F, K, generator=g, dtype=torch.float64) if rank < 0 else own)
        if count:
            runs.append((i, row, row + count))
            row += count
    b = [torch.randn(F, generator=g, dtype=torch.float64) for _ in tasks] if bias else None
    x = torch.randn(row + gap, K, generator=g, dtype=torch.float64)
    wanted = torch.zeros(len(x), F, dtype=torch.float64)
    for i, first, last in runs:
        w = matrices[i]
        wanted[first:last] = x[first:last] @ (formula(w) if isinstance(w, LowRankMatrix) else w).t()
        wanted[first:last] += 0 if b is None else b[i]
    kept = x.clone()
    torch.testing.assert_close(linear_by_runs(x, matrices, b, runs), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(x, kept)


def test_a_change_of_blocks_in_int8_with_shared_factors() -> None:
    g = torch.Generator().manual_seed(0)
    base, x = torch.randn(F, K, generator=g, dtype=torch.float64), torch.randn(3, K, generator=g, dtype=torch.float64)
    codes = torch.randint(-127, 128, (2, 3), generator=g, dtype=torch.int8)
    tall = torch.randint(-127, 128, (4, 2), generator=g, dtype=torch.int8)
    first = Change(codes, tall, torch.tensor([0.25, 0.5]), inputs=torch.rand(3, generator=g).double(), row=2, column=1)
    second = Change(codes, tall[:2], torch.tensor([1.0, 2.0]), outputs=torch.rand(2, generator=g).double(), column=1)
    third = change(g, 3, rows=2, row=5)
    w = LowRankMatrix(base, (first, second, third))
    wanted = x @ formula(w).t()
    for found in (linear_by_runs(x, [w], None, [(0, 0, 3)]), linear(x, w, None), x @ w.merged().t()):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    a, b = w.stacked(torch.float64)
    assert a.shape == (7, K) and b.shape == (F, 7)
    torch.testing.assert_close(base + b @ a, formula(w), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stacked([w, base])[0], formula(w), rtol=1e-12, atol=1e-12)
    # the codes, which both changes share, count once; the base and the shared factors are not the task's own
    assert sum(t.nbytes for t in w.own()) == 6 + 8 + 8 + 4 + 8 + 3 * (K + 2) * 8


def test_adjacent_tasks_of_one_base_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    base = torch.randn(F, K, generator=g)
    tasks = [LowRankMatrix(base, (Change(torch.randn(r, K), torch.randn(F, r)),)) for r in (2, 0, 1)]
    bias, sums = [torch.randn(F) for _ in tasks], list[int]()
    calls: list[int] = []
    original = Tensor.addmm_

    def counted(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        calls.append(len(a))
        return original(y, a, b)

    monkeypatch.setattr(Tensor, "addmm_", counted)
    linear_by_runs(torch.randn(9, K), tasks, bias, [(0, 0, 4), (1, 4, 6), (2, 6, 9)])
    assert calls == [9, 4, 3]  # all rows by the base; then the rows of each task that has a change
    calls.clear()
    monkeypatch.setattr(LowRankMatrix, "merged", lambda m: sums.append(m.rank) or base)
    linear_by_runs(torch.randn(9, K), tasks, bias, [(1, 0, 1), (0, 1, 2), (2, 2, 9)])
    assert calls == [2, 1] and sums == [1]  # the last one has rows enough for a sum: 7 · (F + K) ≥ 2 · F · K


def test_products_with_changes_have_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    c = change(g, 2)
    w = LowRankMatrix(torch.randn(F, K, dtype=torch.float64), (c,), torch.rand(K, dtype=torch.float64))
    x = torch.randn(2, K, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        torch.autograd.grad(linear(x, w, None).sum(), x)[0], whole(w).sum(0).expand(2, -1), rtol=1e-12, atol=1e-12
    )
