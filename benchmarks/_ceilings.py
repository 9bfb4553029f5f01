"""Ceilings of the device, measured in the same run as the figures compared with them."""

import time
from dataclasses import dataclass

import torch
from _runner import Ceilings
from _timing import time_call

KEY = ("what",)


@dataclass(frozen=True)
class Device:
    """Ceilings and launch costs of a device.

    Attributes:
        ceilings: of memory and of the matrix units (bf16; fp32 on a CPU).
        graph_us: from one tiny kernel's start to the next one's inside a CUDA graph, None on a CPU.
        launch_us: time the host needs to launch one tiny kernel from Python, None on a CPU.
        cache_bytes: of the L2 cache, None on a CPU.
    """

    ceilings: Ceilings
    graph_us: float | None = None
    launch_us: float | None = None
    cache_bytes: int | None = None

    def rows(self) -> list[dict[str, object]]:
        """Return a row per number."""
        values = (
            ("copy", self.ceilings.bytes_per_s / 1e9, "GB/s"), ("gemm", self.ceilings.flop_per_s / 1e12, "TFLOP/s"),
            ("graph_gap", self.graph_us, "us"), ("launch", self.launch_us, "us"), ("l2", self.cache_bytes, "bytes"),
        )  # fmt: skip
        return [{"what": w, "value": f"{v:.4g}" if w != "l2" else v, "unit": u} for w, v, u in values if v is not None]


def from_rows(rows: list[dict[str, str]]) -> Ceilings | None:
    """Return the ceilings written by `Device.rows`, the last of each; None if one is missing."""
    values = {row["what"]: float(row["value"]) for row in rows}
    if not {"copy", "gemm"} <= values.keys():
        return None
    return Ceilings(1e9 * values["copy"], 1e12 * values["gemm"])


def measure(device: torch.device, *, quick: bool = False) -> Device:
    """Time a large copy and a large matrix product, of random numbers: on zeros the matrix units run faster.

    Args:
        device: CUDA, or a CPU to try this out.
        quick: small sizes.
    """
    cuda = device.type == "cuda"
    size = (1 << 30 if cuda else 1 << 24) if not quick else 1 << 20
    side = (8192 if cuda else 512) if not quick else 128
    dtype = torch.bfloat16 if cuda else torch.float32
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    copy_us = time_call(lambda: target.copy_(source), device)[0]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    gemm_us = time_call(lambda: a @ b, device)[0]
    ceilings = Ceilings(2 * source.nbytes / (1e-6 * copy_us), 2 * side**3 / (1e-6 * gemm_us))
    if not cuda:
        return Device(ceilings)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return Device(ceilings, *_launch_costs(device), cache)


def _launch_costs(device: torch.device, kernels: int = 500) -> tuple[float, float]:
    """Return microseconds a kernel that does next to nothing, in a graph and launched one by one."""
    x = torch.zeros(1, device=device)
    x.add_(1)  # loads the kernel, which a capture does not allow
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            x.add_(1)
    torch.cuda.synchronize()

    def wall(call: object) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            call()  # type: ignore[operator]
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return 1e6 * best / kernels

    def one_by_one() -> None:
        for _ in range(kernels):
            x.add_(1)

    return wall(graph.replay), wall(one_by_one)
