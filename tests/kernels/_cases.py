"""Parts shared by tests of kernels: device, tolerances, allocations full of NaN."""

import contextlib
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from vtk_kernels import triton_status

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Kernels run on the card where there is one, in Triton's interpreter elsewhere."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Largest error, as a part of the largest value, against the formula in fp64; lower types: `assert_no_worse`."""

HALF = (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,)
"""The interpreter multiplies bf16 bit patterns and truncates: bf16 is tested on a card."""

ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""The checks of `torch.library.opcheck`; "test_faketensor" alone for a further type of the same operator."""

needs_kernel = pytest.mark.skipif(not triton_status().usable, reason=triton_status().reason)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value; NaN and inf where not expected count as inf."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0
    difference = (actual.detach().double().cpu() - expected.detach().double().cpu()).abs().max().item()
    largest = expected.detach().double().abs().max().item()
    return difference / max(largest, 1e-30) if difference == difference else float("inf")


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Compare with the formula in fp64, by default to the tolerance of the type of ``actual``."""
    allowed = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    found = error(actual, expected)
    assert found <= allowed, f"relative error {found:.2e}, allowed {allowed:.0e}"


def assert_no_worse(actual: Tensor, expected: Tensor, plain: Tensor) -> None:
    """Allow twice the error of plain torch in the same type, and half a rounding unit where plain torch is exact."""
    allowed = 2 * error(plain, expected) + torch.finfo(actual.dtype).eps / 2
    assert_close(actual, expected, allowed)


def assert_stats(stats: Tensor, y: Tensor) -> None:
    """Compare row statistics (..., S, 2) with those of ``y`` (..., C) as it is stored, piece by piece, in fp64.

    M2 to a part of itself, the mean to a part of the largest value in its piece: neither may lose digits to the other.
    """
    allowed = 1e-12 if stats.dtype == torch.float64 else 1e-6
    pieces = y.detach().double().split(64, -1)
    assert stats.shape == (*y.shape[:-1], len(pieces), 2)
    for piece, found in zip(pieces, stats.detach().double().unbind(-2), strict=True):
        mean = piece.sum(-1) / piece.shape[-1]
        m2 = ((piece - mean[..., None]) ** 2).sum(-1)
        largest = piece.abs().amax(-1)
        assert ((found[..., 0] - mean).abs() <= allowed * largest).all(), "mean"
        slack = piece.shape[-1] * (allowed * largest) ** 2  # what a mean that is this far off adds
        assert ((found[..., 1] - m2).abs() <= 4 * allowed * m2 + slack).all(), "M2"


@contextlib.contextmanager
def fake_leaves(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors like these on a card that is not there, in half precision, whose gradients are wanted."""
    with FakeTensorMode():
        yield tuple(torch.empty(t.shape, dtype=torch.float16, device="cuda", requires_grad=True) for t in tensors)


def has_torchs_gradient(y: Tensor, *leaves: Tensor) -> bool:
    """Return whether y comes from each leaf by operations of torch alone; asks no engine, which wants a real card."""
    ahead, names, found = [y.grad_fn], set(), []
    while ahead:
        node = ahead.pop()
        if node is not None and node not in names:
            names.add(node)
            found.append(getattr(node, "variable", None))
            ahead += [before for before, _ in node.next_functions]
    torchs = all("vtk" not in node.name() for node in names)
    return torchs and all(any(leaf is t for t in found) for leaf in leaves)


def strided(x: Tensor) -> Tensor:
    """Return the same values two apart in memory: no dimension is contiguous."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


@contextlib.contextmanager
def nan_filled() -> Iterator[None]:
    """Fill all that `torch.empty` and its like allocate with NaN, so that an output nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Counted:
    def __init__(self, kernel: Any, started: list[str], name: str) -> None:
        self.kernel, self.started, self.name = kernel, started, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.started.append(self.name)
        return self.kernel[grid]


def count_launches(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[str]:
    """Return a list to which every kernel that ``modules`` start from now on adds its name."""
    started: list[str] = []
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel") and hasattr(vars(module)[name], "run")]:
            monkeypatch.setattr(module, name, _Counted(getattr(module, name), started, name))
    return started
