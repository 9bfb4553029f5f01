"""Hardware and package versions of a measurement, for the report."""

import importlib.metadata
import platform
from pathlib import Path

PACKAGES = ("vit-toolkit", "torch", "timm", "onnx", "onnxruntime-gpu", "onnxruntime", "openvino", "numpy", "triton")


def versions() -> dict[str, str]:
    """Return the versions of Python and of those packages in `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: str) -> str:
    """Return the name of the hardware behind ``cpu`` or ``cuda:N``."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(torch.device(device))
    return cpu_name()


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
