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
from tests.vtk.families._table import FAMILIES, REFUSED, Family
from vtk.errors import UsageError
from vtk.fused.build import check_model
from vtk.models.meta_model import shapes_only
from vtk.models.structure import unusual_part
from vtk.training.frozen_ffn.blocks import apply_memory_mode
from vtk.training.policies import policy

PAGE = Path(__file__).parents[1] / "reference" / "families.md"

HEAD = """# Model families of timm

Written by `make docs` from the table in `tests/vtk/families`; do not edit by hand. The smallest model of
each family is tested: every parameter is assigned by hand to attention, head, position table, stem, FFN, norm or other,
and the selection of `--train attn` must agree; one epoch is trained; the pack is loaded in a new process and compared
byte by byte; and the ONNX file is compared with torch at batch sizes 1, 2, 3, 7 and 16.

- **BatchNorm**: whether the family has BatchNorm. Frozen ones stay in eval mode in `--train attn`, so that they keep
  the running statistics of the base.
- **Other sizes**: *resampled*: position tables are resampled to `--img-size` (bicubic with antialias), also from and to
  grids that are not square. *Any that fits*: no tensor depends on the size, except tables of relative positions, which
  are resampled too. *Weights' own*: some tensors belong to one image size; another `--img-size` is refused. If windows
  or stages restrict sizes further than the patch, an unsupported size is refused before data is read, with the nearest
  valid sizes.
- **Memory**: whether `--memory gelu8`, `recompute` and `minimal` change what its blocks store for the backward pass;
  otherwise training is plain PyTorch, with a note.
- **Fused**, **bank**: whether `vtk.fuse` and `TaskBank` support it; others are refused in one line, and export, `eval`
  and `predict` use the plain model.
"""

TAIL = """
## Refused

`--train attn` and `--train ffn` refuse a model whose blocks have both in one matrix, and `--train attn` a model without
attention; `--train full` and `--train head` support both.

| model | reason |
| --- | --- |
"""


def rows() -> Iterator[str]:
    """Yield a line of the table for each family."""
    for family in FAMILIES:
        model = _blank(family)
        chosen = policy.select(model, "attn")
        policy.apply(model, chosen)
        memory = apply_memory_mode(model, "minimal").effective
        position = "position" if any(family.group(n) == "position" for n in chosen) else ""
        trains = ", ".join(part for part in ("attention", "head", position) if part)
        name = f"`{family.name}`" + (" (reduced)" if family.name.startswith("tiny_") and not _named(family) else "")
        sizes = "weights' own" if family.fixed else "resampled" if position else "any that fits"
        cells = [name, f"`{type(model).__name__}`", trains, _yes(family.batch_norm), sizes, _yes(memory),
                 _yes(_fuses(model)), _yes(unusual_part(model) is None)]  # fmt: skip
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


def _fuses(model: nn.Module) -> bool:
    try:
        check_model(model)
    except UsageError:
        return False
    return True


def _yes(value: bool) -> str:
    return "yes" if value else "–"


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(write_or_check(PAGE, page(), "the families' tests"))
