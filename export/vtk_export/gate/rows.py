"""The rows of the gate: errors and agreement at each batch size, their table, and the check that fails an export."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vtk import console
from vtk.errors import VerificationError


@dataclass(frozen=True)
class GateRow:
    """One output at one batch size.

    Attributes:
        batch: number of images, all different.
        error: largest absolute difference from torch, graph optimisations on.
        error_plain: the same with the optimisations off.
        bound: largest error allowed, infinite where the cosine is judged.
        agreed: rows whose most likely class is torch's in both sessions, among those compared.
        compared: rows whose two largest logits in torch are further apart than twice the error; of features none.
        excluded: the other rows, where the order of two classes may depend on rounding.
        cosine: smallest cosine of a row with torch's, of both sessions.
        least_cosine: smallest one allowed.
        output: name of the output.
        size: height and width of the images where they are not the model's own.
        runtime: that ran the file, and its precision if that is not the file's.
    """

    batch: int
    error: float
    error_plain: float
    bound: float
    agreed: int
    compared: int
    excluded: int
    cosine: float = 1.0
    least_cosine: float = -math.inf
    output: str = "logits"
    size: tuple[int, int] | None = None
    runtime: str = "ONNX Runtime"

    @property
    def passed(self) -> bool:
        """Whether errors and cosine are within the bounds (NaN is not) and all compared rows agree."""
        near = self.error <= self.bound and self.error_plain <= self.bound and self.cosine >= self.least_cosine
        return near and self.agreed == self.compared


def print_rows(rows: Sequence[GateRow]) -> None:
    """Print the gate's table of each runtime."""
    for runtime in dict.fromkeys(row.runtime for row in rows):
        _print_table(runtime, [row for row in rows if row.runtime == runtime])


def _print_table(runtime: str, rows: Sequence[GateRow]) -> None:
    columns = ["batch", "max error", "unoptimised", "bound", "argmax agreed", "rows excluded"]
    several, angles = len({r.output for r in rows}) > 1, any(r.least_cosine > -math.inf for r in rows)
    cells = []
    for r in rows:
        bound = "–" if math.isinf(r.bound) else f"{r.bound:.1e}"
        line: list[object] = [r.batch, f"{r.error:.1e}", f"{r.error_plain:.1e}", bound, f"{r.agreed} of {r.compared}"]
        if r.size is not None:
            line[0] = f"{r.batch} of {r.size[0]}×{r.size[1]}"
        cells.append([*([r.output] if several else []), *line, r.excluded, *([f"{r.cosine:.6f}"] if angles else [])])
    columns = [*(["output"] if several else []), *columns, *(["least cosine"] if angles else [])]
    console.table(f"{runtime} against PyTorch in fp32", columns, cells, left=(0,) if several else ())


def check_rows(rows: Sequence[GateRow]) -> None:
    """Raise for the first row that failed.

    Raises:
        VerificationError: names the batch size and what was exceeded.
    """
    for row in rows:
        place = f"batch {row.batch}" if row.output == "logits" else f"`{row.output}` at batch {row.batch}"
        if row.size is not None:
            place += f" of {row.size[0]}×{row.size[1]} pixels"
        if row.runtime != GateRow.runtime:
            place += f" in {row.runtime}"
        worst = max(row.error, row.error_plain, key=lambda e: (e != e, e))
        if not worst <= row.bound:
            raise VerificationError(f"{place}: max error {worst:.1e} is above the bound {row.bound:.1e}")
        if not row.cosine >= row.least_cosine:
            raise VerificationError(f"{place}: the cosine with PyTorch is {row.cosine:.6f}, at least "
                                    f"{row.least_cosine:g} is required")  # fmt: skip
        if not row.passed:
            raise VerificationError(f"{place}: top-1 agrees with PyTorch in {row.agreed} of {row.compared}")
