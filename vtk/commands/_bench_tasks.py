"""``vtk tasks bench``: flags, table and JSON."""

from typing import TYPE_CHECKING

from vtk import console
from vtk.bank.config import BenchConfig
from vtk.commands import _cli

if TYPE_CHECKING:
    from vtk.bank.bench_result import BenchResult


def run(argv: list[str], description: str) -> int:
    """Measure and print."""
    config = _cli.parse(
        BenchConfig,
        argv,
        prog="vtk tasks bench",
        description=description,
        examples=(
            "vtk tasks bench --pack runs/pets/task --pack runs/cars/task --images-per-task 4",
            "vtk tasks bench --pack runs/pets/task --copies 16 --batch 16,64",
        ),
    )
    from vtk.bank.bench import bench

    result = bench(config)
    print_result(result)
    console.emit_json(result.to_dict())
    return 0


def print_result(result: "BenchResult") -> None:
    """Print what was measured, in 80 columns."""
    rows = []
    for cell in result.cells:
        for i, (name, side) in enumerate(cell.sides.items()):
            of_single = "" if side.of_single is None else f"{side.of_single:.2f}"
            first = "" if i else cell.images
            numbers = (f"{side.latency_ms:.2f}", f"{side.images_per_s:.1f}", f"{side.speedup:.2f}", of_single)
            rows.append((first, name, *numbers))
    title = f"{result.tasks} tasks on {result.device}, {result.dtype}, medians of {result.rounds} rounds"
    console.table(title, ("images", "side", "ms", "images/s", "× separate", "of one task"), rows, left=(1,))
    console.say("× separate, of one task: medians of the quotients of each round")
    console.say(
        f"weights: bank {console.size(result.bank_bytes)}"
        + (f" and {console.size(result.bank_host_bytes)} on the host" if result.bank_host_bytes else "")
        + f", separate models {console.size(result.separate_bytes)}"
    )
    if result.not_fused:
        console.say(f"no fused sides: {result.not_fused}")
    worst = max(cell.max_difference for cell in result.cells)
    console.say(f"all logits agree {f'within {worst:.1e} of the largest' if worst else 'bit for bit'}")
