"""A profile as text, cell by cell: titles, columns, rows and notes of every report."""

from vtk import console
from vtk.models.devices import DTYPES
from vtk.profiling.cells import BackendResult, Cell
from vtk.profiling.result import ProfileResult
from vtk.profiling.stats import BEYOND, runs_needed
from vtk.runtime.backends.base import needs_onnx

DASH = "–"
UNSTABLE = "~"


def title(result: ProfileResult) -> str:
    """Return the model, shape, precision and hardware in one line."""
    chans, height, width = result.input_shape
    threads = f"{result.threads} thread" + "s" * (result.threads != 1)
    model = f"{result.source} ({result.model})" if result.model not in result.source else result.source
    where = f"{result.device_name} ({result.device}, {threads})"
    return f"{model} · {chans}×{height}×{width} · {result.precision} · {where}"


def heading(backend: BackendResult) -> str:
    """Return a back-end's name, provider, load time and largest output difference, or why it has no numbers."""
    if backend.reason:
        return f"{backend.name}: {backend.status}: {backend.reason}"
    parts = [backend.provider, *([f"floats in {backend.arithmetic}"] if backend.arithmetic in DTYPES else [])]
    if backend.prepare_s is not None:
        what = "ONNX export" if needs_onnx(backend.name) else "compiled ahead of time in"
        parts.append(f"{what} {backend.prepare_s:.1f} s")
    parts.append(f"load {DASH if backend.load_s is None else f'{backend.load_s:.2f} s'}")
    parts.append(f"max diff {DASH if backend.max_diff is None else f'{backend.max_diff:.2g}'}")
    return f"{backend.name}: {', '.join(parts)}"


def columns(backend: BackendResult) -> list[str]:
    """Return the names of the columns of `values`."""
    base = ["batch", "runs", "p50 ms", "p90 ms", "p99 ms", "images/s", _memory_column(backend)]
    base += ["process"] if _has_process(backend) else []
    return [*base, "compile s"] if backend.compiles else base


def values(backend: BackendResult, cell: Cell) -> list[str]:
    """Return the cells of a row as text; a dash stands for an unknown value."""
    mark = UNSTABLE if cell.stable is False else ""
    row = [str(cell.batch), f"{mark}{cell.runs}", ms(cell.p50_ms), ms(cell.p90_ms), ms(cell.p99_ms)]
    row += [rate(cell.images_per_second), _size(cell.memory_bytes)]
    row += [_size(cell.process_bytes)] if _has_process(backend) else []
    return [*row, DASH if cell.first_s is None else f"{cell.first_s:.1f}"] if backend.compiles else row


def _has_process(backend: BackendResult) -> bool:
    return any(cell.process_bytes is not None for cell in backend.cells)


def _memory_column(backend: BackendResult) -> str:
    """Name the memory column: counted bytes, or what an allocator measured."""
    measured = any(cell.peak_memory_bytes is not None for cell in backend.cells)
    return "counted" if not measured and _has_process(backend) else "memory"


def _size(value: int | None) -> str:
    return DASH if value is None else console.size(value)


def work_columns(backend: BackendResult) -> list[str]:
    """Return the names of those columns of `work_values` that a back-end has, none without ceilings and NVML."""
    timed = [cell for cell in backend.cells if cell.status == "ok"]
    known = {
        "TFLOP/s": any(c.roofline is not None for c in timed),
        "% roof": any(c.roofline is not None for c in timed),
        "mJ/image": any(c.energy_per_image_j is not None for c in timed),
        "MHz": any(c.clock_after_mhz is not None for c in timed),
    }
    return [name for name, has in known.items() if has]


def work_values(result: ProfileResult, cell: Cell) -> dict[str, str]:
    """Return a cell's rate, share of the roof, energy and clocks, as text by column."""
    typical, work = cell.typical_ms, result.work
    rate = None if work is None or typical is None else cell.batch * work.flops / (1e9 * typical)
    clocks = (cell.clock_before_mhz, cell.clock_after_mhz)
    return {
        "batch": str(cell.batch),
        "TFLOP/s": DASH if rate is None else f"{rate:.3g}",
        "% roof": DASH if cell.roofline is None else _percent(100 * cell.roofline),
        "mJ/image": DASH if cell.energy_per_image_j is None else f"{1000 * cell.energy_per_image_j:.3g}",
        "MHz": DASH if None in clocks else f"{clocks[0]}→{clocks[1]}",
    }


def notes(result: ProfileResult) -> list[str]:
    """Return the notes below the tables."""
    needed = ", ".join(f"p{q} {runs_needed(q):,}" for q in (50, 90, 99))
    found = [
        f"{DASH} percentile: fewer than {BEYOND} runs beyond it (runs required: {needed}).",
        f"outputs compared with {result.reference}, before timing, after each window and at the end.",
        f"inputs: {result.inputs}.",
        *(f"caution: {text}." for text in result.remarks),
        f"memory: {result.memory}. order: {result.order}.",
    ]
    if any(cell.stable is False for _, cell in result.cells()):
        found.append(f"{UNSTABLE} runs: unstable, the last windows' medians differ by more than the allowed fraction.")
    if result.work is not None and result.ceilings is not None:
        rate = result.ceilings.flop_per_s.get(result.precision)
        found.append(
            f"% roof: minimum time at the device's ceilings (copy {result.ceilings.bytes_per_s / 1e9:.4g} GB/s, matmul "
            f"{DASH if rate is None else f'{rate / 1e12:.3g}'} TFLOP/s) over the median; "
            f"{result.work.flops / 1e9:.3g} GFLOP per image."
        )
    if any(b.compiles for b in result.backends):
        found.append("compile s: first call at a batch size, which compiles a program for that size only.")
    return found


def _percent(value: float) -> str:
    return f"{value:.0f}" if value >= 9.5 else f"{value:.2g}"


def ms(value: float | None) -> str:
    """Format milliseconds with about four digits."""
    if value is None:
        return DASH
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def rate(value: float | None) -> str:
    """Format images per second."""
    return DASH if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"
