"""fp32 rows of one table are computed alike: no back-end leaves TF32 on, and each puts back what it found."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vtk.card import Card
from vtk.errors import UnavailableError
from vtk.models import fp32
from vtk.models.fp32 import FullPrecision
from vtk.runtime.backends import ort_backend, ort_session
from vtk.runtime.backends.base import load_backend
from vtk.runtime.backends.ort_trt_backend import NO_TF32, OrtTrtBackend
from vtk.runtime.opening import open_source

State = tuple[str, bool, bool]


def state() -> State:
    """Return what torch allows: of products, of cuBLAS's, of cuDNN's convolutions."""
    return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


FULL: State = ("highest", False, False)


@pytest.fixture(params=["high", "medium"], autouse=True)
def allowed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    """A program that has allowed TF32, or bf16, everywhere."""
    monkeypatch.setattr(fp32, "_holders", set())  # of back-ends that other tests have not closed
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(request.param)
    torch.backends.cudnn.allow_tf32 = True
    yield state()
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_holders_may_let_go_in_any_order(order: tuple[int, ...], allowed: State) -> None:
    holders = [FullPrecision() for _ in range(3)]
    for number in order[:-1]:
        holders[number].release()
        holders[number].release()  # a second time does nothing
        assert state() == FULL
    holders[order[-1]].release()
    assert state() == allowed


def test_a_holder_that_is_lost_lets_go(allowed: State) -> None:
    with pytest.raises(ZeroDivisionError):
        _fails_after_taking()
    assert state() == allowed


def _fails_after_taking() -> None:
    FullPrecision()
    assert state()[0] == "highest" or 1 / 0
    raise ZeroDivisionError


def test_torch_backends_hold_it_while_they_are_loaded(allowed: State) -> None:
    source = open_source("test_vit", pretrained=False, img_size=32, num_classes=2)
    first, second = (load_backend(name, source, threads=1) for name in ("eager", "fused"))
    assert state() == FULL
    first.close()
    assert state() == FULL
    second.close()
    assert state() == allowed


def test_onnxruntime_is_told_too(card: Card, write_onnx: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, device = write_onnx(card=card), torch.device("cuda", 1)
    (cuda, options), last = ort_session._providers(path, "CUDAExecutionProvider", device)
    assert (cuda, last) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options == {"device_id": 1, "use_tf32": "0"}
    trt, cuda_too, _ = ort_session._providers(path, "TensorrtExecutionProvider", device)
    assert trt == ("TensorrtExecutionProvider", {"device_id": 1, "trt_engine_cache_enable": "0"})
    assert cuda_too[1]["use_tf32"] == "0"
    # the TensorRT provider has no such option; its libraries read a variable when the first of them is loaded
    monkeypatch.setenv(NO_TF32, "1")
    seen: dict[str, str | None] = {}

    def opened(*_: Any) -> Any:
        seen["tf32"] = os.environ.get(NO_TF32)
        raise UnavailableError("no TensorRT")

    monkeypatch.setattr(ort_backend, "open_session", opened)
    with pytest.raises(UnavailableError):
        OrtTrtBackend.load(open_source(path), device=device, dtype=torch.float32, threads=1)
    assert seen == {"tf32": "0"}
