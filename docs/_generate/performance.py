"""Writes docs/results/performance.md from benchmarks/results/*.csv; ``--check`` says whether it is up to date.

Usage: python docs/_generate/performance.py [--check]

Every number on the page comes from a result file; what nobody measured is called "not yet measured".
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from _pages import write_or_check
from _tables import NOT_YET, Row, load

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _bounds
import _cpu_sections as on_cpu
import _gpu_sections as on_gpu
import _sources

PAGE = Path(__file__).resolve().parents[1] / "results" / "performance.md"
RESULTS = Path(_bounds.__file__).with_name("results")

HEAD = """# Performance

Written by `make docs` from `benchmarks/results/*.csv`; do not edit by hand. Each table says on which device, when and
at which commit its rows were measured; each device has its own tables. Outputs of models and kernels are compared with
the reference before they are timed.

A row of our own code on a GPU is *stale* if the code that it timed has changed since: the kernel and everything that it
imports or, for whole models, any kernel or `vtk/fused`. *Of unknown code* means that the row's commit is in no history.
Rows of timm, torch and the device itself do not become stale.

S18x2 is the small model of Touvron et al. 2022 with 18 blocks of two parallel branches, and S36x1 its sequential
counterpart with 36 blocks. B18x2 and B36x1 are the base models, S/16 and B/16 the usual ones. Weights are random, which
does not change the latency.
"""

REPRODUCE = """## Measure again

On a CPU, with nothing else running:

```
python benchmarks/fused_cpu.py
python benchmarks/launches.py
```

On a CUDA machine with torch, Triton and timm (a stage that runs out of time resumes with the same command):

```
pip install --no-deps --no-build-isolation -e .
benchmarks/gpu.sh all --out DIR
python benchmarks/collect.py DIR
```

Then `make docs`. `DIR/summary.txt` compares each figure with its prediction, its floor and its bound.
`DIR/choices.json` holds the measured choices between our kernels and torch's, in the format of
`kernels/vtk_kernels/choices.json`.
"""

FLOOR = """## The floor

A lower bound on the time of a forward pass (`benchmarks/roofline.py`): the larger of FLOPs divided by the rate of a
large bf16 GEMM and bytes divided by the rate of a large copy. Both rates are measured on the same device; a table says
so where they are assumed. For L blocks of P branches with C channels, hidden width rC, N tokens and A classes:

```
FLOPs   L P ((8 + 4 r) N C² + 4 N² C) + stem 2 patches patch² 3 C + head 2 A C, each per image
bytes   every weight once; and, if a block's x and hidden layer do not fit into the L2 cache,
        L (6 + (8 + 2 r) P) N C elements per image: each tensor between two kernels written and read once
```
"""


def section(title: str, name: str, results: Path, body: Callable[[list[Row]], Iterator[str]]) -> Iterator[str]:
    """Yield a section per device of a result file, or that it was not measured."""
    yield f"## {title}"
    rows, known = load(name, results), _sources.recorded(results)
    if not rows:
        yield f"{NOT_YET.capitalize()}."
    rows = [row | {"state": _sources.state_of(name, row, known)} for row in rows]
    for device in dict.fromkeys(row.get("device", "") for row in rows):
        if title.startswith("GPU") and device:
            yield f"**{device}**"
        yield from body([row for row in rows if row.get("device", "") == device])


SECTIONS = (
    ("Kernels per forward pass", "launches.csv", on_cpu.launches),
    ("CPU", "fused_cpu.csv", on_cpu.cpu),
    ("GPU: correctness", "gpu_correct.csv", on_gpu.correct),
    ("GPU: ceilings", "gpu_ceilings.csv", on_gpu.ceilings),
    ("GPU: kernels", "gpu_kernels.csv", on_gpu.kernels),
    ("GPU: whole models", "gpu_e2e.csv", on_gpu.end_to_end),
    ("GPU: time by group of kernels", "gpu_breakdown.csv", on_gpu.breakdown),
    ("GPU: predictions", _bounds.PREDICTIONS, on_gpu.predictions),
    ("Training engine", "engine.csv", on_cpu.engine),
    ("Several tasks in one run", "joint.csv", on_cpu.joint),
)


def page(results: Path = RESULTS) -> str:
    """Return the whole page."""
    parts = [HEAD.strip(), FLOOR.strip()]
    for title, name, body in SECTIONS:
        parts.extend(section(title, name, results, body))
    return "\n\n".join([*parts, REPRODUCE.strip()]) + "\n"


def main() -> int:
    """Write the page, or compare it; where it is written, the code that rows name is first put on record."""
    if "--check" not in sys.argv[1:]:
        _sources.record(RESULTS)
    return write_or_check(PAGE, page(), "benchmarks/results")


if __name__ == "__main__":
    sys.exit(main())
