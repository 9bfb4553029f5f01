"""Warnings about numbers of a profile that are doubtful."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vtk.profiling.cells import BackendResult
    from vtk.profiling.result import ProfileResult

NOISE = 0.02
"""A larger batch that takes less time by more than this fraction counts as noise; clocks alone differ by about 1 %."""

CLOCKS = 0.05
"""A GPU clock that changes by more than this fraction while a cell is timed is reported."""


def warnings_of(result: "ProfileResult") -> tuple[str, ...]:
    """Return one line for each reason to doubt a number."""
    found = ["stopped early: measurements are missing"] if result.stopped else []
    for backend in result.backends:
        for rule in (_falls, _recompiled, _clocks, _above_the_roof):
            found += rule(backend)
        found += _other_arithmetic(backend, result.precision, alone=len(result.backends) == 1)
        found += _simulated(backend)
        found += _unstable(backend, result.stability_pct)
    return tuple(found)


def _falls(backend: "BackendResult") -> Iterator[str]:
    """A larger batch cannot take less time than a smaller one: the machine was busy, so neither is to be trusted."""
    timed = sorted((c for c in backend.cells if c.status == "ok"), key=lambda c: c.batch)
    for small, large in itertools.pairwise(timed):
        a, b = small.typical_ms, large.typical_ms
        if a is not None and b is not None and b < a * (1 - NOISE):
            yield (
                f"{backend.name}: batch {large.batch} took {b:.2f} ms, less than batch {small.batch} with "
                f"{a:.2f} ms: noise; repeat on an idle machine"
            )


def _recompiled(backend: "BackendResult") -> Iterator[str]:
    for cell in backend.cells:
        if cell.status == "ok" and cell.recompiles:
            times = "once" if cell.recompiles == 1 else f"{cell.recompiles} times"
            yield (
                f"{backend.name}: batch {cell.batch} compiled {times} while timed: its times include compilation; "
                "fix the shapes, or use another back-end"
            )


def _clocks(backend: "BackendResult") -> Iterator[str]:
    for cell in backend.cells:
        before, after = cell.clock_before_mhz, cell.clock_after_mhz
        if cell.status == "ok" and before and after and abs(after - before) > CLOCKS * before:
            yield f"{backend.name}: batch {cell.batch}: the GPU clock changed from {before} to {after} MHz while timed"


def _above_the_roof(backend: "BackendResult") -> Iterator[str]:
    above = [c for c in backend.cells if c.status == "ok" and (c.roofline or 0.0) > 1 + NOISE]
    if above:
        sizes = ", ".join(str(c.batch) for c in above)
        yield (
            f"{backend.name}: faster than the device's ceilings at batch {sizes}: these were measured on a busy "
            "machine; repeat with --ceilings"
        )


def _other_arithmetic(backend: "BackendResult", precision: str, *, alone: bool) -> Iterator[str]:
    """Rounded products are other work: their row cannot be set against the others."""
    if backend.arithmetic == "tf32" and any(c.status == "ok" for c in backend.cells):
        yield (
            f"{backend.name}: matrix products use {backend.arithmetic.upper()}, those of the other rows "
            f"{precision}: not the same work; build the engine with --no-tf32 to compare them"
        )
    if not alone and backend.arithmetic == "bf16" != precision and any(c.status == "ok" for c in backend.cells):
        yield (
            f"{backend.name}: floating-point products are in BF16, those of the other rows in {precision}: less exact; "
            "--precision fp32 compares them alike"
        )


def _simulated(backend: "BackendResult") -> Iterator[str]:
    """A CPU has no products in fp8: what it takes for a file of them is not what fp8 takes."""
    if backend.arithmetic == "fp8" and backend.device == "cpu" and any(c.status == "ok" for c in backend.cells):
        yield f"{backend.name}: a CPU only simulates e4m3 products: these times are not those of fp8"


def _unstable(backend: "BackendResult", allowed_pct: float | None) -> Iterator[str]:
    loose = [c for c in backend.cells if c.status == "ok" and c.stable is False]
    if loose:
        worst = max(c.spread or 0.0 for c in loose)
        sizes = ", ".join(str(c.batch) for c in loose)
        yield (
            f"{backend.name}: unstable at batch {sizes}: the last three windows' medians differ by up to "
            f"{100 * worst:.1f} %, allowed {allowed_pct or 0:g} %; use an idle machine or a longer --duration"
        )
