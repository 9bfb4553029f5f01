"""Checks the C++ compiler that ``torch.compile`` needs, and summarises its errors in one line."""

import logging
import os
import shutil

from vtk.errors import UnavailableError

_COMPILERS = ("g++", "c++", "clang++", "cl")


def check_compiler(what: str, instead: str) -> None:
    """Refuse to work without a C++ compiler, which inductor needs on the CPU and for its launchers on CUDA.

    Args:
        what: the feature that needs it, for the message.
        instead: alternative without a compiler, for the message.

    Raises:
        UnavailableError: there is no compiler.
    """
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else _COMPILERS)):
        raise UnavailableError(f"{what} needs a C++ compiler and none is on PATH; install g++ or {instead}")


def quiet() -> None:
    """Suppress inductor's warning of a missing CUDA runtime on machines without a GPU."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def failure(error: BaseException) -> str | None:
    """Return the first line of a compiler error; None for an error from elsewhere."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    cause = getattr(error, "inner_exception", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
