import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vtk_kernels import support, triton_status

KERNELS = Path(support.__file__).resolve().parents[1]


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: f"card {index}")


def hide(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    real = importlib.import_module

    def import_module(wanted: str, package: str | None = None) -> object:
        if wanted == name:
            raise error
        return real(wanted, package)

    monkeypatch.setattr(support.importlib, "import_module", import_module)


@pytest.fixture
def triton_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", type(sys)("triton"))
    monkeypatch.setattr(sys.modules["triton"], "__version__", "9.9.9", raising=False)


def test_import_touches_neither_triton_nor_torch() -> None:
    code = "import sys, vtk_kernels; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": str(KERNELS)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd="/", check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("value,expected", [("1", True), ("true", True), (" ON ", True), ("0", False), ("", False)])
def test_interpreter_switch_is_read_like_triton_reads_it(
    value: str, expected: bool, monkeypatch: pytest.MonkeyPatch, triton_there: None
) -> None:
    pretend_cuda(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", value)
    status = triton_status()
    assert (status.usable, status.interpreter) == (expected, expected)
    assert status.version == "9.9.9"


def test_no_device_is_no_error_and_capability_is_not_asked(monkeypatch: pytest.MonkeyPatch, triton_there: None) -> None:
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: pytest.fail("asked without a device"))
    status = triton_status()
    assert not status.usable
    assert "CUDA" in status.reason and "torch path" in status.reason


@pytest.mark.parametrize(
    "capabilities,usable,said",
    [
        (((8, 0),), True, "cuda:0"),
        (((9, 0),), True, "cuda:0"),
        (((12, 0),), True, "12.0"),
        (((7, 5),), False, "card 0 (7.5)"),
        (((7, 5), (8, 6)), True, "cuda:1"),
    ],
)
def test_capability_8_0_is_the_line(
    capabilities: tuple[tuple[int, int], ...],
    usable: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    triton_there: None,
) -> None:
    pretend_cuda(monkeypatch, *capabilities)
    status = triton_status()
    assert status.usable is usable and said in status.reason and not status.interpreter


def test_rocm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, triton_there: None) -> None:
    pretend_cuda(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert not triton_status().usable and "ROCm" in triton_status().reason


def test_a_device_that_fails_to_start_is_a_reason_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, triton_there: None
) -> None:
    pretend_cuda(monkeypatch, (9, 0))

    def broken(index: int = 0) -> tuple[int, int]:
        raise RuntimeError("CUDA unknown error\n  while starting")

    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    status = triton_status()
    assert not status.usable and status.reason.endswith("CUDA unknown error while starting")


@pytest.mark.parametrize("error", [ImportError("No module named 'triton'"), OSError("libtriton.so: bad ELF")])
def test_missing_or_broken_triton_says_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    hide(monkeypatch, "triton", error)
    status = triton_status()
    assert status == support.TritonStatus(False, f"Triton cannot be imported: {error}", None)


def test_missing_torch_says_so(monkeypatch: pytest.MonkeyPatch, triton_there: None) -> None:
    hide(monkeypatch, "torch", ImportError("no torch"))
    status = triton_status()
    assert not status.usable and "torch cannot be imported: no torch" in status.reason and status.version == "9.9.9"
