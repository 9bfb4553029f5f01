"""What ``torch.compile`` needs here, and what its failures say in one line."""

import logging
import os
import shutil

from vtk.errors import UnavailableError

_COMPILERS = ("g++", "c++", "clang++", "cl")


def check_compiler(what: str, instead: str) -> None:
    """Refuse to work without a C++ compiler, which inductor needs on the CPU and for its launchers on CUDA.

    Args:
        what: needs it.
        instead: what to do without one.

    Raises:
        UnavailableError: says so.
    """
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else _COMPILERS)):
        raise UnavailableError(f"{what} needs a C++ compiler and none is on PATH; install g++ or {instead}")


def quiet() -> None:
    """Keep inductor from warning of a missing CUDA runtime on every machine without a GPU."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def failure(error: BaseException) -> str | None:
    """Return what went wrong inside of the compiler, in a line; None for an error that is none of the compiler's."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    cause = getattr(error, "inner_exception", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
