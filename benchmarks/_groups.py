"""Groups kernels by function, from their names; without torch, since documents use it."""

import re
from collections.abc import Iterable, Mapping

GAPS = "gaps"
"""The row of `breakdown` that holds what a replay took beyond its kernels; it is the last of its cell."""

OTHER = "other"

GROUPS = (
    ("attention", r"sdpa|attention|flash|fmha"),
    ("patch embedding", r"convolve|fprop|patchify|nchwtonhwc|nhwctonchw"),
    ("norms", r"norm"),
    ("matrix products", r"nvjet|gemm|gemv|splitk|cutlass|linear"),
    ("GELU", r"gelu"),
)
"""Name and pattern; the first that is found counts: attention of cuDNN is an "fprop" too, a convolution an "sgemm"."""

COLUMNS = ("matrix products", "attention", "GELU", "norms", "patch embedding", OTHER, GAPS)
"""The groups in the order to print."""


def group_of(kernel: str) -> str:
    """Return the group of a kernel."""
    if kernel == GAPS:
        return GAPS
    return next((name for name, pattern in GROUPS if re.search(pattern, kernel.lower())), OTHER)


def by_group(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the microseconds of each of `COLUMNS`, from those of each kernel."""
    found = dict.fromkeys(COLUMNS, 0.0)
    for kernel, us in times:
        found[group_of(kernel)] += us
    return found


def cells(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return microseconds by group for each model, px and batch that was measured to its end, the last time it was."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    begun: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        cell = (row["model"], row["px"], row["batch"])
        begun.setdefault(cell, {})[row["kernel"]] = float(row["us"])
        if row["kernel"] == GAPS:
            found[cell] = by_group(begun.pop(cell).items())
    return found
