"""Limits of a kernel on a card, and the comparison of two runs of `_offline`."""

from collections.abc import Iterable, Iterator
from typing import Any

from tests.kernels._offline_occupancy import CARDS, resident, wanted
from vtk_kernels._resident import RESIDENT

GROWTH = 1.10
"""Registers may grow by this factor over the baseline."""

TENSOR_CORES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Instruction that a product of 64 rows or more must become."""

ABSENT = {100: {"_residual_kernel"}, 120: {"_residual_kernel"}}
"""Kernels that launchers do not start on cards of a capability."""

Row = dict[str, Any]
"""What `_offline.measure` returns."""


def absent(capabilities: Iterable[int]) -> set[str]:
    """Return the kernels that no launcher starts on any of these cards."""
    return set.intersection(*(ABSENT.get(capability, set()) for capability in capabilities))


def faults(row: Row, capability: int, before: Row | None) -> Iterator[str]:
    """Say what is wrong with a row of `measure`; ``before`` is the baseline's, of the same Triton version."""
    if row["stack"] or row["local"]:
        yield f"spills: STACK {row['stack']}, LOCAL {row['local']} bytes with {row['registers']} registers"
    if row["shared"] > CARDS[capability].block:
        yield f"shared memory {row['shared']} bytes, the card has {CARDS[capability].block}"
    elif row["kernel"] not in RESIDENT:
        yield f"`vtk_kernels._resident.RESIDENT` says nothing of {row['kernel']}"
    else:
        fit = resident(row["registers"], row["shared"], row["warps"], capability)
        counted_on = wanted(RESIDENT[row["kernel"]], row["programs"], capability)
        if fit < counted_on:
            yield (
                f"{fit} programs fit on a multiprocessor, its launcher counts on {counted_on}: {row['registers']} "
                f"registers, {row['warps']} warps, {row['shared']} bytes of shared memory"
            )
    if row["tensor_cores"] == 0:
        yield f"no {TENSOR_CORES[capability]} in a product of {row['blocks']}"
    yield from row.get("order", ())
    if before is not None and row["registers"] > GROWTH * before["registers"]:
        yield f"registers {before['registers']} → {row['registers']}"


def compare(found: dict[str, Any], baseline: dict[str, Any], whole: bool) -> list[str]:
    """Return every fault of a run, as lines: spills, limits, growth, kernels that are missing on either side."""
    same = found["triton"] == baseline["triton"]
    compared = {label.rsplit(" ", 1)[1] for label in baseline["rows"]}  # capabilities
    lines = [f"no case launches {name}" for name in found["never launched"]]
    for label, row in found["rows"].items():
        before = baseline["rows"].get(label)
        if same and before is None and label.rsplit(" ", 1)[1] in compared:
            lines.append(f"{label}: not in the baseline; run _offline.py --write")
        capability = int(label.rsplit("sm_", 1)[1])
        lines += [f"{label}: {fault}" for fault in faults(row, capability, before if same else None)]
    missing = set(baseline["rows"]) - set(found["rows"]) if whole else set()
    missing |= {r["kernel"] for r in baseline["rows"].values()} - {r["kernel"] for r in found["rows"].values()}
    missing -= absent(int(label.rsplit("sm_", 1)[1]) for label in found["rows"])
    return lines + [f"{label}: in the baseline, but no longer compiled" for label in sorted(missing)]
