"""Checks whether Triton can run on this machine, and gives the reason if it cannot.

Nothing is imported or asked of a device when this module is imported: ``import vtk_kernels`` works without Triton and
without a GPU. (Libraries that call ``torch.cuda.get_device_capability`` while decorating cannot be imported there.)
"""

import importlib
import os
from dataclasses import dataclass

MIN_CAPABILITY = (8, 0)
"""Ampere: the first generation with bf16 matrix units, asynchronous copies and the shared memory our tiles need."""


@dataclass(frozen=True)
class TritonStatus:
    """Answer of `triton_status`.

    Attributes:
        usable: kernels can be launched, on a device or in the interpreter.
        reason: one line: where kernels run, or what is missing.
        version: Triton's version, None when it cannot be imported.
        interpreter: kernels run in Triton's interpreter on the CPU: right results, hundreds of times slower.
    """

    usable: bool
    reason: str
    version: str | None = None
    interpreter: bool = False


def triton_status() -> TritonStatus:
    """Say whether Triton kernels can run: on a CUDA device of capability 8.0 or newer, or in the interpreter.

    Asks anew at every call and never raises, so that a caller can choose the torch path.
    """
    version, problem = _import_version("triton")
    if version is None:
        return TritonStatus(False, f"Triton cannot be imported: {problem}")
    torch_version, problem = _import_version("torch")
    if torch_version is None:
        return TritonStatus(False, f"torch cannot be imported: {problem}", version)
    if interpreting():
        return TritonStatus(True, "TRITON_INTERPRET is set: the interpreter runs kernels, for tests", version, True)
    return TritonStatus(*_device_status(), version)


def interpreting() -> bool:
    """Return whether the environment asks for the interpreter.

    Triton decides when a kernel is decorated: setting the variable after a kernel module was imported changes nothing.
    """
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "yes", "on", "y")


def _import_version(name: str) -> tuple[str | None, str]:
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken shared library raises OSError, a wrong pairing anything else: all mean "no"
        return None, _one_line(error)
    return str(getattr(module, "__version__", "unknown")), ""


def _device_status() -> tuple[bool, str]:
    import torch

    if torch.version.hip is not None:
        return False, "this torch is built for ROCm; the kernels are tuned and tested for CUDA only"
    if not torch.cuda.is_available():
        built = "no CUDA device is visible" if torch.version.cuda else "this torch is built without CUDA"
        return False, f"{built}; the torch path is used instead"
    found = []
    try:
        for index in range(torch.cuda.device_count()):
            capability, name = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
            found.append(f"{name} ({capability[0]}.{capability[1]})")
            if capability >= MIN_CAPABILITY:
                return True, f"kernels run on cuda:{index}, {found[-1]}"
    except (RuntimeError, AssertionError) as error:
        return False, f"the CUDA device cannot be initialised: {_one_line(error)}"
    needed = f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return False, f"needs a CUDA device of capability {needed} or newer; found {', '.join(found) or 'none'}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
