import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UnavailableError
from vtk.profiling import memory
from vtk.profiling.config import ProfileConfig
from vtk.profiling.profile import run
from vtk.profiling.result import ProfileResult
from vtk.runtime.source import Source

Fault = Callable[[int, Tensor, int], Tensor]
"""(batch, right logits, number of the call) to what the back-end returns; may sleep or raise."""


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5)).eval()


@dataclass(frozen=True)
class TinySource(Source):
    def model(self) -> nn.Module:
        return tiny_model()


@dataclass
class FakeBackend:
    name: str
    fault: Fault | None = None
    sync_s: float = 0.0
    batch: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    provider: str = "fake provider"
    load_s: float = 0.25
    calls: int = 0
    log: list[str] = field(default_factory=list)

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        images = inputs["pixel_values"]
        self.calls += 1
        with torch.inference_mode():
            logits = self.model(images.float())
        if self.fault is not None:
            logits = self.fault(len(images), logits, self.calls)
        return {"logits": logits}

    def __post_init__(self) -> None:
        self.model = tiny_model()
        self.log.append(f"load {self.name}")

    def synchronize(self) -> None:
        time.sleep(self.sync_s)

    def close(self) -> None:
        self.log.append(f"close {self.name}")


class CompilingBackend(FakeBackend):
    def reset(self) -> None:
        self.log.append("reset")


def fake_source() -> Source:
    card = Card(ModelSpec("tiny"), InputSpec(8, 8), tuple("abcde"))
    return TinySource("checkpoint", "tiny", None, card)


class Fakes:
    """What tests build profiles of; a fixture, since tests cannot import from one another."""

    Backend = FakeBackend
    Compiling = CompilingBackend
    source = staticmethod(fake_source)

    @staticmethod
    def run(backends: Mapping[str, Any], names: tuple[str, ...] | None = None, **options: Any) -> ProfileResult:
        """Profile back-ends, or raise what stands in their place; ``names=()`` asks for the default set."""

        def load(name: str, source: Source, **_: Any) -> Any:
            found = backends.get(name, UnavailableError(f"back-end `{name}` is not here"))
            if isinstance(found, BaseException):
                raise found
            return found

        values = {"batch_sizes": (1, 2), "duration": 0.02, "device": "cpu", "threads": 1, **options}
        config = ProfileConfig(backends=tuple(backends) if names is None else names, **values)
        return run(config, fake_source(), load, show_progress=False)


@pytest.fixture(autouse=True)
def _no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection takes a quarter of a second with torch loaded, and a profile of fakes makes several."""
    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture
def fakes() -> type[Fakes]:
    return Fakes
