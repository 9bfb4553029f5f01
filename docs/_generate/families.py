"""Writes docs/reference/families.md from the table of tests/vtk/families; ``--check`` compares it.

Usage: python docs/_generate/families.py [--check]

Support is determined by the code itself, on a model without values, so the page agrees with what is refused.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from _pages import write_or_check
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.vtk.families._census import support
from tests.vtk.families._table import FAMILIES, REFUSED, Family
from vtk.models.meta_model import shapes_only
from vtk.training.policies import policy

PAGE = Path(__file__).parents[1] / "reference" / "families.md"

HEAD = """# Model families of timm

Written by `make docs` from the table in `tests/vtk/families`; do not edit by hand. Tests take the smallest model of
each family. Every parameter is assigned by hand to attention, head, position embedding, stem, FFN, norm or other, and
`--train attn` must agree. One epoch is trained; the pack is loaded in a new process and compared byte by byte; the ONNX
file is compared with torch at batch sizes 1, 2, 3, 7 and 16. [Plain Vision Transformers](architectures.md) has each
architecture of theirs.

- **BatchNorm**: the family has BatchNorm layers. Those that `--train attn` freezes stay in eval mode during training,
  so that their running statistics stay those of the base.
- **Other sizes**: *resampled*: position embeddings follow `--img-size` (bicubic with antialiasing), also to and from
  grids that are not square. *Any that fits*: nothing depends on the size, or only tables of relative positions, which
  are resampled too. *Weights' own*: biases belong to one image size; `--img-size` with weights of another is refused.
  If windows or stages need more than a multiple of the patch, a size that does not fit is refused before any data is
  read, with the nearest sizes that fit.
- **Memory**: `--memory act8`, `recompute` and `minimal` change what its blocks store. For other families training is
  plain PyTorch, and a line says so.
- **Fused**, **bank**: `vtk.fuse` and `TaskBank` accept it. They refuse others in one line; export, `eval` and `predict`
  use the model unchanged.
"""

TAIL = """
## Refused

`--train attn` and `--train ffn` refuse a model whose blocks have both in one matrix, and `--train attn` refuses a model
without attention. `--train full` and `--train head` accept both.

| model | reason |
| --- | --- |
"""


def rows() -> Iterator[str]:
    """Yield a line of the table for each family."""
    for family in FAMILIES:
        model = _blank(family)
        chosen, refused = policy.select(model, "attn"), support(model).refusals
        position = "position" if any(family.group(n) == "position" for n in chosen) else ""
        trains = ", ".join(part for part in ("attention", "head", position) if part)
        name = f"`{family.name}`" + (" (reduced)" if family.name.startswith("tiny_") and not _named(family) else "")
        sizes = "weights' own" if family.fixed else "resampled" if position else "any that fits"
        taken = [_yes(engine not in refused) for engine in ("memory", "fuse", "bank")]
        cells = [name, f"`{type(model).__name__}`", trains, _yes(family.batch_norm), sizes, *taken]
        yield f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the page."""
    columns = ("model", "class", "`--train attn` trains", "BatchNorm", "other sizes", "memory", "fused", "bank")
    lines = [HEAD, f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *rows(), TAIL.rstrip("\n")]
    return "\n".join([*lines, *(f"| `{name}` | {_plain(why)} |" for name, why in REFUSED.items())]) + "\n"


def _blank(family: Family) -> nn.Module:
    with shapes_only():
        try:
            return timm.create_model(family.name, num_classes=3, img_size=family.size, **family.kwargs)
        except TypeError:  # families that support any size have no argument for it
            return timm.create_model(family.name, num_classes=3, **family.kwargs)


def _named(family: Family) -> bool:
    return "tests." not in sys.modules[timm.model_entrypoint(family.name).__module__].__name__


def _yes(value: bool) -> str:
    return "yes" if value else "–"


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(write_or_check(PAGE, page(), "the families' tests"))
