"""A device's ceilings, measured once and kept in ``$VTK_HOME/ceilings.json``."""

import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk.card import from_plain
from vtk.errors import DataError
from vtk.files import home
from vtk.formats import read_json, write_json
from vtk.models.devices import DTYPES
from vtk.profiling.machine import device_name
from vtk.profiling.work import Ceilings

_LEAST, _TRY_S, _LONG_S = 3, 0.5, 0.05
"""A rate is that of the fastest of at least 3 calls, tried for half a second; 50 ms is long for one."""


def key(device: torch.device, threads: int) -> str:
    """Return the name under which a device's ceilings are kept; a CPU's depend on the threads."""
    name = device_name(str(device))
    return name if device.type == "cuda" else f"{name}, {threads} thread{'s' * (threads != 1)}"


def path() -> Path:
    """Return the file; it need not exist."""
    return home() / "ceilings.json"


def stored(device: torch.device, threads: int) -> Ceilings | None:
    """Return what an earlier measurement found, None without one.

    Raises:
        DataError: the file is damaged.
    """
    file = path()
    if not file.is_file():
        return None
    value = read_json(file)
    found = value.get(key(device, threads)) if isinstance(value, dict) else None
    return None if found is None else from_plain(Ceilings, found, str(file))


def measure(device: torch.device, threads: int, *, quick: bool = False) -> Ceilings:
    """Time a large copy, and a large matrix product in each precision, and keep the result.

    Of random numbers: on zeros matrix units run faster. A precision whose product the device cannot do is left out.

    Args:
        device: CUDA or CPU.
        threads: of torch on a CPU.
        quick: small sizes, for tests.

    Raises:
        DataError: the file that is already there is damaged, or cannot be written.
    """
    cuda, try_s = device.type == "cuda", 0.01 if quick else _TRY_S
    before, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        found = Ceilings(
            _copy_rate(device, 1 << 20 if quick else 1 << 30 if cuda else 1 << 28, try_s),
            _product_rates(device, (64,) if quick else (8192,) if cuda else (256, 512, 1024, 2048), try_s),
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
    finally:
        torch.set_num_threads(before)
        torch.backends.cuda.matmul.allow_tf32 = tf32
    kept: Any = read_json(path()) if path().is_file() else {}
    if not isinstance(kept, dict):
        raise DataError(f"{path()} is not an object of device names; delete it and measure again")
    path().parent.mkdir(parents=True, exist_ok=True)
    write_json(path(), {**kept, key(device, threads): dataclasses.asdict(found)})
    return found


def describe(found: Ceilings) -> str:
    """Say the ceilings in one line."""
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in found.flop_per_s.items())
    return f"copy {found.bytes_per_s / 1e9:.3g} GB/s, products {rates}"


def _copy_rate(device: torch.device, size: int, try_s: float) -> float:
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, try_s)


def _product_rates(device: torch.device, sides: tuple[int, ...], try_s: float) -> dict[str, float]:
    """Return FLOP/s by precision, of the best side; a side that takes long is the last."""
    rates: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        for side in sides:
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            try:
                seconds = _seconds(lambda a=a, b=b: a @ b, device, try_s)  # type: ignore[misc]
            except RuntimeError:  # a CPU build without this product
                break
            rates[name] = max(rates.get(name, 0.0), 2 * side**3 / seconds)
            if seconds > _LONG_S:
                break
    return rates


def _seconds(call: Callable[[], Tensor], device: torch.device, try_s: float) -> float:
    """Return the seconds of the fastest call: what the device can do when nothing disturbs it."""
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < _LEAST or time.perf_counter() - begin < try_s:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)
