import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels._cases import (
    ALL,
    DEVICE,
    HALF,
    assert_close,
    assert_no_worse,
    assert_stats,
    count_launches,
    fake_leaves,
    has_torchs_gradient,
    nan_filled,
    needs_kernel,
    strided,
)
from vtk_kernels import LAUNCHES, _broadcast_kernels
from vtk_kernels._broadcast_kernels import launch
from vtk_kernels.context_broadcast import (
    context_broadcast,
    context_broadcast_backward_ref,
    context_broadcast_ref,
    context_broadcast_stats_ref,
)
from vtk_kernels.row_stats import rstd_ref

OPS = torch.ops.vtk_kernels
SHAPES = [(1, 1, 64), (2, 2, 100), (3, 17, 1), (2, 197, 24), (1, 577, 16), (1, 17, 1000), (0, 5, 48)]
BOUNDS = [[0, 7, 7, 30], [0], [0, 0, 0, 12, 12], [0, 1, 2, 40]]  # empty segments, none at all, rows after the last end


def formula(x: Tensor, m: Tensor, scale: Tensor | None = None, bounds: list[int] | None = None) -> Tensor:
    """Matrix form: (½ or 1) m + (½ or scale) · A m, A the block matrix of 1/N; image by image, in fp64."""
    x, m = x.double(), m.double()
    if bounds is None:
        parts = [(a, b) for a, b in zip(x, m, strict=True)]
    else:
        ends = [*bounds, len(m)]
        parts = [(x[i:j], m[i:j]) for i, j in itertools.pairwise(ends)]
    done = []
    for a, b in parts:
        mean = torch.full((len(b), len(b)), 1 / max(len(b), 1), dtype=torch.float64, device=b.device) @ b
        done.append(a + 0.5 * (b + mean) if scale is None else a + b + scale.double() * mean)
    if bounds is not None:
        return torch.cat(done)
    return torch.stack(done) if done else x


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + 0.75).to(dtype)


def starts(bounds: list[int]) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_formula(shape: tuple[int, ...], scaled: bool) -> None:
    x, m = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    scale = torch.randn(shape[-1], dtype=torch.float64) if scaled else None
    y, stats = context_broadcast_stats_ref(x, m, scale)
    assert_close(y, formula(x, m, scale))
    assert torch.equal(context_broadcast_ref(x, m, scale)[0], y)
    assert_stats(stats, y)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_packed_reference_is_the_formula(bounds: list[int]) -> None:
    x, m, scale = (torch.randn(*size, dtype=torch.float64) for size in ((40, 12), (40, 12), (12,)))
    for with_scale in (None, scale):
        y, mean = context_broadcast_ref(x, m, with_scale, starts(bounds).cpu())
        assert_close(y, formula(x, m, with_scale, bounds))
        assert mean.shape == (len(bounds), 12)


@needs_kernel
@pytest.mark.parametrize(
    "shape,scaled", [*((shape, n % 2 == 0) for n, shape in enumerate(SHAPES)), ((2, 17, 40), False)], ids=str
)
def test_kernel_is_the_formula(shape: tuple[int, ...], scaled: bool) -> None:
    x, m, g = (draw(*shape) for _ in range(3))
    scale = draw(shape[-1]) if scaled else None
    with nan_filled():
        y, stats = context_broadcast(x, m, scale, stats=True, use_triton=True)
        gm, g_mean = launch(None, g, scale, None)
    assert y.is_contiguous() and stats.is_contiguous()
    assert_close(y, formula(x, m, scale))
    assert_stats(stats, y)
    assert_close(gm, formula(torch.zeros_like(g), g, scale))
    assert_close(g_mean, g.double().mean(1))


@needs_kernel
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_packed_kernel_is_the_formula(bounds: list[int]) -> None:
    x, m, scale = draw(40, 40), draw(40, 40), draw(40)
    for with_scale in (None, scale):
        with nan_filled():
            y, stats = context_broadcast(x, m, with_scale, starts(bounds), stats=True, use_triton=True)
        assert_close(y, formula(x, m, with_scale, bounds))
        assert_stats(stats, y)
        assert_close(launch(x, m, with_scale, starts(bounds))[1], context_broadcast_ref(x, m, None, starts(bounds))[1])


@needs_kernel
def test_packed_equals_each_image_alone() -> None:
    sizes = [5, 1, 17, 2]
    x, m = draw(sum(sizes), 48), draw(sum(sizes), 48)
    bounds = [0, *itertools.accumulate(sizes)]
    packed = context_broadcast(x, m, None, starts(bounds), use_triton=True)
    for i, j in itertools.pairwise(bounds):
        alone = context_broadcast(x[None, i:j], m[None, i:j], use_triton=True)[0]
        assert torch.equal(packed[i:j], alone)


@needs_kernel
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype, scaled: bool) -> None:
    x, m = draw(2, 50, 96, dtype=dtype), draw(2, 50, 96, dtype=dtype)
    scale = draw(96, dtype=dtype) if scaled else None
    y, stats = context_broadcast(x, m, scale, stats=True, use_triton=True)
    assert (y.dtype, stats.dtype) == (dtype, torch.float32)
    mean = m.mean(1, keepdim=True)
    expected = formula(x, m, scale)
    assert_no_worse(y, expected, x + 0.5 * (m + mean) if scale is None else x + (m + scale * mean))
    assert_stats(stats, y)
    assert_no_worse(context_broadcast(x, m, scale, use_triton=True), expected, y)


@needs_kernel
@pytest.mark.parametrize("use_triton", [False, True])
def test_statistics_survive_a_large_mean(use_triton: bool) -> None:
    x, m = draw(1, 5, 100) + 1000, draw(1, 5, 100)
    y, stats = context_broadcast(x, m, stats=True, use_triton=use_triton)
    assert_stats(stats, y)  # a sum of squares, 1e8 to a sum of 100, would have lost every digit


@needs_kernel
def test_strided_operands() -> None:
    whole = draw(3, 9, 40)
    view = whole.transpose(0, 1)[2:7].transpose(0, 1)
    scale = torch.full((80,), 2.0, device=DEVICE)[::2]
    for x, m in ((strided(whole), whole), (whole, strided(whole)), (whole[:, 4:], view)):
        assert_close(context_broadcast(x, m, scale, use_triton=True), formula(x, m, scale))
    g = draw(40).expand(3, 9, 40)
    assert_close(launch(None, g, None, None)[0], formula(torch.zeros_like(g), g))


@needs_kernel
@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(0, 6), max_size=4), rest=st.integers(0, 3), channels=st.integers(1, 90))
def test_any_shape(sizes: list[int], rest: int, channels: int) -> None:
    bounds = [0, *itertools.accumulate(sizes)]
    rows = bounds[-1] + rest
    x, m = draw(rows, channels), draw(rows, channels)
    with nan_filled():
        y, stats = context_broadcast(x, m, None, starts(bounds), stats=True, use_triton=True)
    assert_close(y, formula(x, m, None, bounds))
    assert_stats(stats, y)


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _broadcast_kernels)
    x = draw(2, 3, 16)
    for name, run in (
        ("context_broadcast", lambda: context_broadcast(x, x, draw(16), use_triton=True)),
        ("context_broadcast_stats", lambda: context_broadcast(x, x, stats=True, use_triton=True)),
        ("context_broadcast_backward", lambda: launch(None, x, None, None)),
    ):
        started.clear()
        run()
        assert len(started) == LAUNCHES[name]


@pytest.mark.parametrize("run", [context_broadcast, OPS.context_broadcast], ids=["reference", "operator"])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients(run: object, packed: bool) -> None:
    assert callable(run)
    shape = (7, 3) if packed else (2, 3, 3)
    bounds = torch.tensor([0, 2, 2, 6], dtype=torch.int32) if packed else None
    x, m, scale = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, shape, (3,)))
    assert torch.autograd.gradcheck(lambda x, m: run(x, m, None, bounds), (x, m))
    assert torch.autograd.gradcheck(lambda x, m, s: run(x, m, s, bounds), (x, m, scale))
    frozen = scale.detach()
    assert torch.autograd.gradcheck(lambda m: run(x.detach(), m, frozen, bounds), m)
    assert torch.autograd.gradcheck(lambda x: run(x, m.detach(), frozen, bounds), x)


def test_it_is_its_own_gradient() -> None:
    g, m = (torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(2))
    gm, mean = context_broadcast_backward_ref(g)
    assert_close(gm, formula(torch.zeros_like(g), g))
    assert_close((gm * m).sum(), (g * formula(torch.zeros_like(m), m)).sum())
    assert_close(mean, g.sum(1) / 5)


def test_statistics_have_torchs_gradient() -> None:
    x, m = (torch.randn(2, 3, 70, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y, stats = context_broadcast(x, m, stats=True)
    rstd = rstd_ref(stats, 70, 1e-6)
    found = torch.autograd.grad((y * rstd[..., None] ** 2).sum(), (x, m))
    wanted = formula(x, m)
    wanted = wanted / (wanted.var(-1, keepdim=True, unbiased=False) + 1e-6)
    for one, other in zip(found, torch.autograd.grad(wanted.sum(), (x, m)), strict=True):
        assert_close(one, other, 1e-10)
    with fake_leaves(x, m) as faked:
        assert all(has_torchs_gradient(y, *faked) for y in context_broadcast(*faked, stats=True))


def test_the_gradient_keeps_means_and_not_the_branch() -> None:
    kept: list[Tensor] = []
    x, m, scale = draw(2, 50, 16).cpu(), draw(2, 50, 16).cpu(), draw(16).cpu().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda t: t):
        OPS.context_broadcast(x.requires_grad_(), m.requires_grad_(), scale)
    assert sorted(t.numel() for t in kept) == [16, 32]


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operators_keep_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    x, m, scale = (torch.randn(s, dtype=dtype) for s in ((2, 3, 16), (2, 3, 16), (16,)))
    flat, bounds = x.flatten(0, 1), torch.tensor([0, 2, 2], dtype=torch.int32)
    op = OPS.context_broadcast.default
    torch.library.opcheck(op, (x.clone().requires_grad_(), m.clone().requires_grad_()), test_utils=checks)
    torch.library.opcheck(op, (strided(x), m, scale.clone().requires_grad_()), test_utils=checks)
    torch.library.opcheck(op, (flat, strided(flat).requires_grad_(), scale, bounds), test_utils=checks)
    for args in ((x.transpose(0, 1), m.transpose(0, 1)), (flat, flat, scale, bounds)):
        torch.library.opcheck(OPS.context_broadcast_stats.default, args, test_utils=checks)
    for args in ((strided(x),), (flat, scale, bounds)):
        torch.library.opcheck(OPS.context_broadcast_backward.default, args, test_utils=checks)


def test_compiles_without_a_break() -> None:
    x, m, scale = (torch.randn(s, requires_grad=True) for s in ((2, 5, 16), (2, 5, 16), (16,)))

    def step(x: Tensor, m: Tensor, scale: Tensor) -> Tensor:
        y = OPS.context_broadcast(x * 2, m, scale)[0]
        return (OPS.context_broadcast(y, m)[0] ** 2).sum()

    torch.compile(step, fullgraph=True, backend="aot_eager")(x, m, scale).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, m, scale)]
    loss = (formula(formula(2 * wide[0], wide[1], wide[2]), wide[1]) ** 2).sum()
    for found, expected in zip((x, m, scale), torch.autograd.grad(loss, wide), strict=True):
        assert found.grad is not None
        assert_close(found.grad, expected, 5e-6)


X, L, S = torch.ones(2, 3, 4), torch.ones(6, 4), torch.ones(4)
B = torch.tensor([0, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    "args,said",
    [
        ((L, L), r"`x` is \(6, 4\); it must be \(B, N, C\)"),
        ((X, X, None, B), r"`x` is \(2, 3, 4\); it must be \(T, C\) with `cu_seqlens`"),
        ((X, X[:1]), r"`m` is \(1, 3, 4\) torch.float32; it must be like `x`, \(2, 3, 4\)"),
        ((X, X.half()), "torch.float16; it must be like `x`"),
        ((X, X, S[:3]), r"`scale` is \(3,\); it must be \(4,\)"),
        ((L, L, None, B.long()), r"`cu_seqlens` is \(2,\) torch.int64; it must be \(S \+ 1,\) torch.int32"),
        ((L, L, None, B[:0]), r"`cu_seqlens` is \(0,\)"),
        ((L, L, None, B.to("meta")), "`cu_seqlens` is on meta; it must be on the device of `x`, cpu"),
    ],
)
def test_what_does_not_fit_is_refused(args: tuple[Tensor, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        context_broadcast(*args)
    if not any(isinstance(t, Tensor) and t.is_meta for t in args):
        with pytest.raises(ValueError, match=said):
            OPS.context_broadcast(*args)
