"""GELU in the epilogue of cuBLASLt's product: where it is taken, and how far tanh is from the error function."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from timm.layers import GELUTanh
from torch import Tensor, nn

from vtk.fused import fuse, launches
from vtk.fused.mlp_stage import is_exact_gelu, is_tanh_gelu, linear_gelu_tanh
from vtk.fused.stages import Plan
from vtk_kernels._dispatch import HALF


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is chosen for fc1."""
    said = ["cublaslt"]

    def choose(op: str, *shape: Any) -> str:
        return {"linear_gelu": said[0], "splitk_linear": "aten", "ln_folded": "separate", "residual": "separate"}[op]

    for module in ("model", "stage_output", "mlp_stage", "residual"):
        monkeypatch.setattr(f"vtk.fused.{module}.choose", choose)
    yield said


def model(act: str | type[nn.Module]) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=3, act_layer=act)


@pytest.mark.parametrize(
    ("act", "choice", "taken"),
    [
        ("gelu", "cublaslt", "_addmm_activation"), ("gelu", "triton", "linear_gelu"), ("gelu", "aten", "gelu"),
        ("gelu_tanh", "cublaslt", "_addmm_activation"), ("gelu_tanh", "triton", "_addmm_activation"),
        ("gelu_tanh", "aten", "gelu"), ("relu", "cublaslt", "relu"),
    ],
)  # fmt: skip
def test_what_computes_the_hidden_layer(act: str, choice: str, taken: str, answer: list[str]) -> None:
    answer[0] = choice
    counts = launches(model(act))
    ways = {name: counts[name] for name in ("_addmm_activation", "linear_gelu", "gelu", "relu") if counts[name]}
    assert ways == {taken: 3}
    # qkv, output projection and fc2, and fc1 where it is a product of its own
    assert counts["addmm"] == 3 * (3 + (taken in ("gelu", "relu"))) + 1


def test_kinds_of_gelu() -> None:
    kinds = [(is_exact_gelu(act), is_tanh_gelu(act)) for act in (nn.GELU(), nn.GELU("tanh"), GELUTanh(), nn.SiLU())]
    assert kinds == [(True, False), (False, True), (False, True), (False, False)]


def exact(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))


def by_tanh(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("width", [0.5, 1.0, 2.0])
def test_tanh_rounded_once_is_no_further_from_gelu_than_torch(dtype: torch.dtype, width: float) -> None:
    """The epilogue has fp32 sums and one rounding; torch rounds the sums, too. In fp64, since no CPU runs cuBLASLt."""
    u = torch.randn(1 << 16, dtype=torch.float64) * width

    def away(y: Tensor) -> float:
        return float((y.double() - exact(u)).norm() / exact(u).norm())

    assert 1.4e-4 < away(by_tanh(u)) < 2.1e-4
    assert away(by_tanh(u).to(dtype)) < away(torch.nn.functional.gelu(u.to(dtype)))


def test_the_operator_multiplies_by_the_transposed_weight_and_falls_back_where_it_cannot() -> None:
    h, w, b = torch.randn(2, 5, 12), torch.randn(7, 12), torch.randn(7)
    u = torch.nn.functional.linear(h.double(), w.double(), b.double())
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 1e-6)):
        y = linear_gelu_tanh(*(t.to(dtype) for t in (h, w, b)))
        assert y.dtype == dtype and y.shape == (2, 5, 7)
        assert (y.double() - exact(u)).abs().max() <= tolerance * u.abs().max()  # torch's is exact on a CPU
    leaf = h.half().requires_grad_()
    linear_gelu_tanh(leaf, w.half(), b.half()).sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_on_a_cpu_it_is_the_models_own_gelu(act: str, dtype: torch.dtype, answer: list[str]) -> None:
    stage: Any = fuse(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, act_layer=act), dtype).stages[1]
    h = torch.randn(1, 5, 192).to(dtype)
    found = stage.activated(h, stage.w_in, stage.b_in, Plan(kernels=True))
    u = torch.nn.functional.linear(h.double(), stage.w_in.double(), stage.b_in.double())
    expected = by_tanh(u) if act == "gelu_tanh" else exact(u)
    other = exact(u) if act == "gelu_tanh" else by_tanh(u)
    away, further = ((found.double() - t).square().mean().sqrt() for t in (expected, other))
    assert away <= (1e-12 if dtype == torch.float64 else 1e-3) and away < further
