"""Clocks and energy of an NVIDIA GPU, read from NVML where its Python binding is installed (``nvidia-ml-py``)."""

from dataclasses import dataclass
from typing import Any

import torch

MIN_S = 1.0
"""Shortest time over which an energy is given: the counter moves in steps of up to a tenth of a second."""


@dataclass(frozen=True)
class Reading:
    """State of a GPU at one moment; None where the driver does not tell.

    Attributes:
        clock_mhz: of the multiprocessors.
        energy_j: since the driver was loaded.
    """

    clock_mhz: int | None = None
    energy_j: float | None = None


class Meter:
    """Reads one device; every reading is empty on a CPU, without the binding, or where the driver refuses."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            # by its UUID: NVML counts the devices that CUDA_VISIBLE_DEVICES hides too
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml
        except (pynvml.NVMLError, AttributeError):  # no permission, or a torch that does not tell the UUID
            return

    def read(self) -> Reading:
        """Return clock and energy now."""
        if self._nvml is None:
            return Reading()
        clock = self._try(lambda: self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        millijoules = self._try(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return Reading(clock, None if millijoules is None else millijoules / 1000)

    def _try(self, call: Any) -> int | None:
        try:
            return int(call())
        except self._nvml.NVMLError:  # a card or a virtual machine without this counter
            return None


def energy_per_image(joules: float | None, seconds: float, images: int) -> float | None:
    """Return joules an image, None where the counter is absent or the time too short for its steps."""
    if joules is None or seconds < MIN_S or images < 1:
        return None
    return joules / images
