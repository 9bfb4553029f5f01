"""The module that a server gives to its models in Python, in a few lines, and what imports those models as it does."""

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vtk_export.triton import served

SERVED = Path(served.__file__).parent


class Tensor:
    def __init__(self, name: str, value: np.ndarray) -> None:
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._value


class Response:
    def __init__(self, output_tensors: list[Tensor], error: Any = None) -> None:
        self.found = {t.name(): t.as_numpy() for t in output_tensors}
        self.error = error


class TritonError(Exception):
    INVALID_ARG = 3

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


def request(images: np.ndarray, tasks: list[str]) -> dict[str, Tensor]:
    names = np.array([[task.encode()] for task in tasks], dtype=np.object_)
    return {"pixel_values": Tensor("pixel_values", images.astype(np.float32)), "task": Tensor("task", names)}


Load = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Return what imports a file of `served` as a server does."""
    fake = types.ModuleType("triton_python_backend_utils")
    said: list[str] = []
    logger = types.SimpleNamespace(log_error=said.append, log_warn=said.append, log_info=said.append, said=said)
    vars(fake).update(
        Tensor=Tensor, InferenceResponse=Response, TritonError=TritonError, TritonModelException=RuntimeError,
        Logger=logger, get_input_tensor_by_name=lambda request, name: request.get(name),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake)

    def imported(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, SERVED / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    imported("vtk_rows")
    imported("vtk_index")
    imported("vtk_watch")
    imported("vtk_counters")
    imported("vtk_prepack")
    yield imported
