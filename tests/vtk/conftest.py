"""What takes long in a run of a second, and is the same in the next one, is done once."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import nn

from vtk.training import memory
from vtk.training.frozen_ffn.estimate import Footprint

_PLAIN = (int, float, str, tuple, type(None))


def _structure(model: nn.Module) -> tuple[Any, ...]:
    """Return all that a count of bytes could depend on: every module with its plain attributes, every tensor's form."""
    modules = [
        (name, type(module), {k: v for k, v in sorted(vars(module).items()) if isinstance(v, _PLAIN)},
         [(k, getattr(v, "__qualname__", "")) for k, v in vars(module).items() if callable(v)])
        for name, module in model.named_modules(remove_duplicate=False)
    ]  # fmt: skip
    tensors = [
        (name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return repr(model), repr(modules), repr(tensors)


@pytest.fixture(scope="session", autouse=True)
def _count_memory_once() -> Iterator[None]:
    """Runs with ``--memory auto`` count first; `vtk.training.frozen_ffn.estimate` itself is tested as it is."""
    count, known = memory.footprints, {}

    def footprints(model: nn.Module, size: Sequence[int], *args: Any, **kwargs: Any) -> list[Footprint]:
        key = (*_structure(model), repr((tuple(size), args, sorted(kwargs.items()))))
        if key not in known:
            known[key] = count(model, size, *args, **kwargs)
        return list(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "footprints", footprints)
        yield
