"""``vtk tasks bench``: flags, table and JSON."""

from typing import TYPE_CHECKING

from vtk import console
from vtk.bank.config import BenchConfig
from vtk.commands import _cli

if TYPE_CHECKING:
    from vtk.bank.bench_result import BenchResult, SyntheticResult


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
            "vtk tasks bench --tasks 100 --rank 16 --batch 1,16",
        ),
    )
    if config.tasks is not None:
        from vtk.bank.synthetic_bench import bench_synthetic

        synthetic = bench_synthetic(config)
        print_synthetic(synthetic)
        console.emit_json(synthetic.to_dict())
        return 0
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


def print_synthetic(result: "SyntheticResult") -> None:
    """Print what was measured of synthetic tasks, in 80 columns."""
    ranks, (height, width) = ", ".join(map(str, result.ranks)), result.size
    console.say(f"{result.tasks} synthetic tasks of {result.model}, {height}×{width} px, {result.classes} classes")
    console.say(f"rank {ranks}, {result.pack_dtype} factors")
    one = result.bytes.one_model
    held = (
        ("one model", one), ("bank", result.bytes.bank), ("  its base and shared tables", result.bytes.bank_base),
        ("  its tasks' own weights", result.bytes.bank_factors), ("  merged copies of tasks", result.bytes.bank_merged),
        ("  on the host, for adding tasks", result.bytes.bank_host),
        (f"{result.tasks} separate models", result.bytes.separate), ("packs on disk", result.bytes.packs),
    )  # fmt: skip
    rows = [(what, console.size(size), f"{size / one:.2f}") for what, size in held]
    console.table(f"weights, {result.dtype} on {result.device}", ("", "bytes", "× one model"), rows, left=(0,))
    timed = []
    for cell in result.cells:
        for i, (name, side) in enumerate(cell.sides.items()):
            first = ("", "") if i else (cell.images, cell.tasks)
            numbers = (
                f"{side.latency_ms:.2f}",
                f"{side.images_per_s:.1f}",
                f"{side.of_one:.2f}",
                f"{side.speedup:.2f}",
            )
            timed.append((*first, name, *numbers))
    console.table(
        f"one call, medians of {result.rounds} rounds",
        ("images", "tasks", "side", "ms", "images/s", "time of one", "× separate"), timed, left=(2,),
    )  # fmt: skip
    if result.models_held < result.tasks:
        console.say(f"separate models: {result.models_held} were timed, in turn; their bytes are those of one each")
    for cell in result.cells:
        if cell.idle is not None:
            console.say(f"{result.tasks - cell.tasks} idle tasks: {cell.idle:.2f}, same tasks / bank of these only")
    adding = result.adding
    console.say(
        f"adding a task: {adding.median_ms:.1f} ms; early {adding.early_ms:.1f}, late {adding.late_ms:.1f}, "
        f"the first {adding.first_ms:.0f}"
    )
    worst = max(cell.max_difference for cell in result.cells)
    console.say(f"logits of the bank and of each task's model agree within {worst:.1e} of the largest")
