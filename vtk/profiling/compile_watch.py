"""Counts compilations while calls are timed: such a time is not that of the model."""

import sys
from collections.abc import Callable
from typing import Any


class Compilations:
    """Counts programs that torch.compile and Triton make between `start` and `stop`.

    torch.compile: frames that dynamo translated, again or for the first time. Triton: kernels that its just-in-time
    compiler built or read from its cache on disk, for instance because a new batch size made another specialisation.
    """

    def __init__(self) -> None:
        self._frames = 0
        self._kernels = 0
        self._hook: Callable[..., Any] | None = None

    def start(self) -> None:
        """Begin to count."""
        self._frames, self._kernels = _dynamo_frames(), 0
        if (runtime := _triton_runtime()) is not None:
            self._hook = runtime.jit_post_compile_hook
            runtime.jit_post_compile_hook = self._count

    def stop(self) -> int:
        """Return how many there were since `start`."""
        if (runtime := _triton_runtime()) is not None:
            runtime.jit_post_compile_hook = self._hook
        return _dynamo_frames() - self._frames + self._kernels

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        self._kernels += 1
        return None if self._hook is None else self._hook(*args, **kwargs)


def _dynamo_frames() -> int:
    utils = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds, and who compiles has done so
    return 0 if utils is None else int(utils.counters["frames"]["total"])


def _triton_runtime() -> Any:
    """Return Triton's settings of its compiler, None where nobody has loaded it or this setting is absent."""
    runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
    return runtime if hasattr(runtime, "jit_post_compile_hook") else None
