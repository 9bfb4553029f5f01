"""Writes docs/reference/architectures.md: each plain ViT of timm, and what takes it; ``--check`` compares the page.

Usage: python docs/_generate/architectures.py [--check]

Support is what `vtk.fuse`, `TaskBank` and the memory modes say about a model without values, of one block. fp16 exports
are rows of benchmarks/results/fp16_export.csv, which `benchmarks/fp16_export.py` writes as it runs them.
"""

import sys
from collections.abc import Hashable, Iterator
from pathlib import Path

import timm
import torch
from _pages import write_or_check
from _tables import Row, load

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO))
from tests.vtk.families import _census as census  # noqa: E402 - from the repository, which no package holds

PAGE = REPO / "docs" / "reference" / "architectures.md"
RESULTS = REPO / "benchmarks" / "results"

HEAD = """# Architectures of timm's plain Vision Transformers

Written by `make docs`; do not edit by hand. All architectures of the nine modules of timm whose models are stacks of
blocks over one sequence of tokens, {architectures} of them with {sets} sets of pretrained weights. Every one trains, is
evaluated and exports as plain PyTorch; the columns say what more it gets.

- **weights**: sets of pretrained weights in timm {timm}.
- **fuse**: [`vtk.fuse`](../guides/fused.md) folds it for inference ({fuse} sets).
- **bank**: a [`TaskBank`](../guides/bank.md) serves many tasks on one base of it ({bank} sets).
- **memory**: [`--memory minimal`](../guides/memory.md) does all it says for its blocks ({memory} sets).
- **fp16 export**: the largest error of a logit of an fp16 ONNX file in ONNX Runtime against torch in fp32, with random
  weights, where `vtk export onnx --dtype fp16` was run and passed its gate; else –.

What is refused is so by name: the [last section](#refused) has the reasons.
"""

TITLES = {
    "vision_transformer": "Vision Transformers", "deit": "DeiT", "eva": "EVA, DINOv3 and others with rotary embedding",
    "beit": "BEiT", "vision_transformer_relpos": "Relative positions", "naflexvit": "NaFlexViT",
    "vision_transformer_hybrid": "Hybrids", "vision_transformer_sam": "SAM", "levit": "LeViT",
}  # fmt: skip
"""Headings, by the module of timm."""

COLUMNS = "| architecture | weights | fuse | bank | memory | fp16 export |\n| --- | --: | --- | --- | --- | --- |"


def page() -> str:
    """Return the page."""
    names = census.architectures()
    known: dict[Hashable, census.Support] = {}
    found = {name: _support(name, known) for name in names}
    exported = {row["model"]: row for row in load("fp16_export.csv", RESULTS)}
    taken = {
        engine: sum(sets for name, sets in names.items() if engine not in found[name].refusals)
        for engine in ("fuse", "bank", "memory")
    }
    lines = [HEAD.format(architectures=len(names), sets=sum(names.values()), timm=timm.__version__, **taken)]
    for module in census.MODULES:
        mine = [name for name in names if census.module_of(name) == module]
        lines += [f"## {TITLES[module]}", "", f"`timm.models.{module}`", ""]
        lines.append(COLUMNS)
        lines += [_row(name, names[name], found[name], exported.get(name)) for name in mine]
        lines.append("")
    return "\n".join([*lines, *_refusals(found)]) + "\n"


def _support(name: str, known: dict[Hashable, census.Support]) -> census.Support:
    model = census.blank(name, depth=1)
    key = census.signature(model), census.ends(model)
    if key not in known:
        known[key] = census.support(model)
    return known[key]


def _row(name: str, sets: int, found: census.Support, exported: Row | None) -> str:
    answers = ["–" if engine in found.refusals else "yes" for engine in ("fuse", "bank", "memory")]
    cells = [f"`{name}`", str(sets or "–"), *answers, "–" if exported is None else exported["error"]]
    return f"| {' | '.join(cells)} |"


def _refusals(found: dict[str, census.Support]) -> Iterator[str]:
    yield "## Refused\n"
    for engine, title in (("fuse", "`vtk.fuse`"), ("bank", "`TaskBank`"), ("memory", "`--memory`")):
        reasons: dict[str, list[str]] = {}
        for name, support in found.items():
            if why := support.refusals.get(engine):
                reasons.setdefault(why, []).append(name)
        yield f"{title}:\n"
        for why, names in reasons.items():
            yield f"- {why} ({', '.join(f'`{name}`' for name in names)})"
        yield ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(write_or_check(PAGE, page(), "timm and vtk"))
