"""Kernels that one forward pass of the fused model starts on CUDA: counted, not timed, so any machine can.

    python benchmarks/launches.py

Both forms of the plan: with norms as kernels of their own, and with norms folded into the products. Written to
``results/launches.csv``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import _bounds
import _rows
import torch
from _models import END_TO_END


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "launches.csv")
    parser.add_argument("--models", nargs="*", default=list(END_TO_END))
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args(argv)
    if not args.skip_tests:
        _rows.require_green(["tests/vtk/fused"])
    from vtk.fused import count_launches

    for name in args.models:
        # width changes no launch; small models are quicker to fold
        kwargs = {"embed_dim": 64, "num_heads": 2}
        model = END_TO_END[name].smaller(**kwargs).build(device=torch.device("cpu"))
        forms = ((name, False, _bounds.LAUNCHES), (_bounds.folded(name), True, _bounds.FOLDED_LAUNCHES))
        for label, ln_folded, bounds in forms:
            count = count_launches(model, torch.bfloat16, ln_folded=ln_folded)
            row = {"model": label, "kernels": count, "bound": bounds.get(name, "")}
            print("  ".join(map(str, row.values())))
            _rows.append(args.results, {**row, **_rows.context()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
