"""Names of a model's forms, and what its latencies and kernels must hold; without torch, since documents use it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Row = Mapping[str, str]

CARD = "H200"
"""The card that the bounds of `e2e` were written for; on another one they say how far it is from that."""

LATENCIES = {
    ("S18x2", 224, 1): "<= 0.45 ms", ("S/16", 224, 1): "<= 0.32 ms", ("B/16", 224, 1): "<= 0.42 ms",
    ("B18x2", 224, 1): "<= 0.80 ms", ("S18x2", 224, 256): ">= 16000 images/s", ("B18x2", 224, 256): ">= 5000 images/s",
    ("B/16", 224, 256): ">= 15000 images/s",
}  # fmt: skip
"""Model, px and batch to what either form of the fused model in a graph must hold, in bf16."""

PREDICTIONS = "gpu_predictions.csv"
"""What `predict` wrote down before a run."""

TUNED = ("S18x2", "S/16", "B/16")
"""Models that are also compiled by torch with max-autotune."""

FUSED = "fused+graph"
"""The fused model with norms as kernels of their own, 7 kernels a block, in a CUDA graph."""

FOLDED = "folded+graph"
"""The fused model with the norms inside the products, 5 kernels a block, in a CUDA graph."""

OVER_GRAPH_MODELS = ("DINOv3 S/16", "DINOv3 B/16", "EVA-02 B/14")
OVER_GRAPH = {"1": 1.5, "64": 1.2}
"""Models with rotary embedding, and batch to how many times quicker than `GRAPH` the fused model in a graph must be."""

FOLDED_MODELS = ("S18x2", "B18x2", "B/16", "S/16", *OVER_GRAPH_MODELS)
"""Models that are measured in both forms."""

LAUNCHES = {
    "S18x2": "<= 130", "B18x2": "<= 130", "B/16": "<= 88", "S/16": "<= 88", "DINOv3 B/16": "<= 89",
    "EVA-02 B/14": "<= 102",
}  # fmt: skip
FOLDED_LAUNCHES = {
    "S18x2": "<= 95", "B18x2": "<= 95", "B/16": "<= 65", "S/16": "<= 65", "DINOv3 B/16": "<= 66",
    "EVA-02 B/14": "<= 67",
}  # fmt: skip
"""Kernels of a forward pass, in the one form and in the other."""

TWINS = (("S18x2", "S36x1"), ("B18x2", "B36x1"))
"""Parallel models and their sequential twins: the parallel one must not be slower at any batch."""

GRAPH = "timm+graph"
"""timm's model in a CUDA graph."""

COMPILED = "compile max-autotune (blocks)+graph"
SPEEDUPS = {"1": 1.2, "8": 1.0, "64": 1.0, "256": 1.0}
"""Batch to how many times quicker than `COMPILED` the fused model in a graph must be, in either form."""


def predicted(rows: Iterable[Row], form: str = "after") -> dict[tuple[str, str, str, str], float]:
    """Return the ms of each model, px, batch and provider that rows of `PREDICTIONS` say of a form."""
    return {(r["model"], r["px"], r["batch"], r["provider"]): float(r["ms"]) for r in rows if r["form"] == form}


def folded(model: str) -> str:
    """Return what rows call the folded form of a model, where it stands beside the other under one provider."""
    return f"{model}, folded"


@dataclass(frozen=True)
class Verdict:
    """A bound and what was measured.

    Attributes:
        what: model, size, batch and who ran it.
        bound: a sign, a number and a unit.
        value: in that unit.
        floor_ms: of the model's latency there.
        met: whether the bound holds.
    """

    what: str
    bound: str
    value: float
    floor_ms: str
    met: bool

    def __str__(self) -> str:
        value = f"{self.value:.2f}" if self.bound.endswith("×") else f"{self.value:g}"
        return f"{self.what}: {self.bound}, measured {value}, floor {self.floor_ms} ms: {self.says}"

    @property
    def says(self) -> str:
        """The outcome as a word."""
        return "met" if self.met else "missed"


def verdicts(rows: Iterable[Row]) -> Iterator[Verdict]:
    """Yield a verdict for each bound that the rows of one device allow; later rows of a cell replace earlier ones."""
    cells = {(r["model"], r["px"], r["batch"], r["provider"]): r for r in rows if r["median_ms"]}
    for (model, px, batch, provider), row in cells.items():
        if row["bound"]:
            sign, limit, unit = row["bound"].split()
            value = float(row["median_ms"] if unit == "ms" else row["images_s"])
            met = value <= float(limit) if sign == "<=" else value >= float(limit)
            what = f"{model}, {px} px, batch {batch}, {provider}"
            yield Verdict(what, row["bound"], value, row["floor_ms"], met)
    for parallel, twin in TWINS:
        for (model, px, batch, provider), row in _by_batch(cells):
            other = cells.get((twin, px, batch, provider))
            if (model, provider) == (parallel, FUSED) and other:
                yield _ratio(f"{parallel} against {twin}, {px} px, batch {batch}, {provider}", other, row, 1.0)
    for (model, px, batch, provider), row in _by_batch(cells):
        other = cells.get((model, px, batch, COMPILED))
        if provider in (FUSED, FOLDED) and other and batch in SPEEDUPS:
            what = f"{model}, {px} px, batch {batch}, {provider} against {COMPILED}"
            yield _ratio(what, other, row, SPEEDUPS[batch])
        timm = cells.get((model, px, batch, GRAPH))
        if provider in (FUSED, FOLDED) and timm and model in OVER_GRAPH_MODELS and batch in OVER_GRAPH:
            what = f"{model}, {px} px, batch {batch}, {provider} against {GRAPH}"
            yield _ratio(what, timm, row, OVER_GRAPH[batch])


def _ratio(what: str, other: Row, mine: Row, limit: float) -> Verdict:
    ratio = float(other["median_ms"]) / float(mine["median_ms"])
    return Verdict(what, f">= {limit:.2f} ×", ratio, mine["floor_ms"], ratio >= limit)


def _by_batch(cells: Mapping[tuple[str, str, str, str], Row]) -> list[tuple[tuple[str, str, str, str], Row]]:
    return sorted(cells.items(), key=lambda item: (item[0][0], int(item[0][1]), int(item[0][2])))
