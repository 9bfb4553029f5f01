"""Writes docs/reference/initialization.md from the table of initial weights; ``--check`` says whether it is up to date.

Usage: python docs/_generate/initialization.py [--check]
"""

import sys
from pathlib import Path

from _pages import write_or_check
from _tables import table

from vtk.models.initialization.table import TABLE, Draw

PAGE = Path(__file__).parents[1] / "reference" / "initialization.md"
HEAD = """# Initial weights

The table is written by `make docs` from `vtk.models.initialization.table`; do not edit it by hand.

Layers that are not timm's start from the weights of the paper's code: `--init papers`, the default of `vtk train`,
`vtk finetune` and `vtk pretrain`, and `init="papers"` of `vtk.create_model`. `--init 0.1` draws the numbers that
version 0.1 drew from the same `--seed`, to repeat its runs. The card records it as `data.init` (`card.init`); cards
without it are of runs with 0.1, and a resumed run keeps the weights that it started from. Models of timm start as
timm initialises them. A run prints the kinds of the table whose initial weights depend on the option, if it has any.

The table gives distribution and standard deviation. `fan_in` is the number of inputs of one output (channels ×
kernel), `fan_out` that of outputs × kernel. torch's default for linear layers and convolutions is the uniform
distribution of deviation 1/√(3·fan_in), for weights and biases. A normal distribution that is cut at ±0.02, its own
deviation, has the deviation 0.54·0.02.
"""
TAIL = """
What this changes: in version 0.1 the projections of AlterNet's attention had the deviation 0.02 at any width. The
norm of the attention's branch was 0.02 to 0.07 of its stream at the start of `alternet_18_cifar`, and 0.002 to 0.01
with a quarter of its width. With the published code's initialisation, torch's default for the whole network, it is
0.15 to 0.18 at its full width, as in that code, and 0.2 to 0.3 at a quarter.
"""


def _old(row_value: Draw | None, today: Draw | None) -> str:
    return str(row_value) if row_value is not None and row_value != today else "the same"


def page() -> str:
    """Return the whole page."""
    lines = []
    for kind, row in TABLE.items():
        old = [_old(row.old_weight, row.weight)]
        if row.bias is not None:
            old.append(_old(row.old_bias, row.bias))
        lines.append(
            (
                f"`{kind}`", row.layers, str(row.weight), "none" if row.bias is None else str(row.bias),
                "the same" if set(old) == {"the same"} else "; bias ".join(old), row.source,
            )
        )  # fmt: skip
    head = ("kind", "layers", "weight", "bias", "in 0.1", "source")
    return f"{HEAD}\n{table(head, lines, left=len(head))}\n{TAIL}"


def main() -> int:
    """Write the page, or compare it."""
    return write_or_check(PAGE, page(), "the table of vtk.models.initialization")


if __name__ == "__main__":
    sys.exit(main())
