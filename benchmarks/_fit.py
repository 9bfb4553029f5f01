"""The constants of `_cost` from measured rows, by least squares between bounds; and how well a fit predicts others.

Residuals are the logarithm of predicted over measured latency of each whole model, and for each profiled one the
difference of each group of kernels as a share of the pass. Levenberg and Marquardt's steps are taken in logarithms and
cut at the bounds, from their geometric middle: no constant starts where somebody saw it end.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import _bounds
import _groups
import numpy as np
from _cost import CEILING, NAMES, PLAUSIBLE, SLACK, Constants, Kernel, kernels_of, pass_us
from _rows import read as rows_of

COMMIT = "fd6ca4a"
GROUP_WEIGHT = 1.5
"""Of a group of kernels beside a whole model: profiled shares are steadier than a latency that the host ends."""

INSIDE = 0.5
"""Share of the gap that a profiler counts to the kernels: it is measured from start to start of empty ones."""

CEILING_WEIGHT = 0.05
"""Of the logarithm of a constant over its ceiling: of two fits that are as good, the one that is nearer to them."""

Subject = tuple[str, int]
"""Model and pixels: what is left out as one."""


@dataclass(frozen=True)
class Measured:
    """What one run measured.

    Attributes:
        latencies: µs of each model, px and batch.
        groups: µs by group of kernels of those that were profiled.
        ceilings: by the names of `CEILING`.
    """

    latencies: Mapping[tuple[str, int, int], float]
    groups: Mapping[tuple[str, int, int], Mapping[str, float]]
    ceilings: Mapping[str, float]

    @property
    def subjects(self) -> list[Subject]:
        """Each model and size once."""
        return list(dict.fromkeys(cell[:2] for cell in self.latencies))

    def without(self, subject: Subject) -> "Measured":
        """Return this without anything of one model and size, its profile included."""
        kept = {cell: us for cell, us in self.latencies.items() if cell[:2] != subject}
        return Measured(kept, {c: g for c, g in self.groups.items() if c[:2] != subject}, self.ceilings)


def load(results: Path, commit: str = COMMIT) -> Measured:
    """Return the rows of a commit: fused models in a graph, their kernels, and what the card reached."""

    def of(name: str) -> list[dict[str, str]]:
        return [row for row in rows_of(results / name) if row["git"] == commit]

    latencies = {
        (r["model"], int(r["px"]), int(r["batch"])): 1e3 * float(r["median_ms"])
        for r in of("gpu_e2e.csv") if r["provider"] == _bounds.FUSED and r["median_ms"]
    }  # fmt: skip
    groups = {(m, int(p), int(b)): found for (m, p, b), found in _groups.cells(of("gpu_breakdown.csv")).items()}
    return Measured(latencies, groups, {row["what"]: float(row["value"]) for row in of("gpu_ceilings.csv")})


def limits(ceilings: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return the least and the largest value of each constant, in the order of `NAMES`."""
    return [
        (ceilings[CEILING[name]] / SLACK, ceilings[CEILING[name]] * SLACK) if name in CEILING else PLAUSIBLE[name]
        for name in NAMES
    ]


def fit(measured: Measured) -> Constants:
    """Return the constants that fit best."""
    passes = [(kernels_of(*cell, "fd6ca4a"), us) for cell, us in measured.latencies.items()]
    profiles = [(kernels_of(*cell, "fd6ca4a"), groups) for cell, groups in measured.groups.items()]

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = Constants(*np.exp(logs).tolist())
        found = [math.log(pass_us(kernels, constants) / us) for kernels, us in passes]
        for kernels, groups in profiles:
            found += _shares(kernels, groups, constants)
        found += [CEILING_WEIGHT * math.log(getattr(constants, n) / measured.ceilings[c]) for n, c in CEILING.items()]
        return np.array(found)

    bounds = np.log(np.array(limits(measured.ceilings)))
    logs = _least_squares(residuals, bounds[:, 0], bounds[:, 1])
    return Constants(*np.exp(logs).tolist())


def _shares(kernels: Sequence[Kernel], groups: Mapping[str, float], constants: Constants) -> list[float]:
    total = sum(groups.values())
    modelled = dict.fromkeys((k.group for k in kernels), 0.0)
    for kernel in kernels:
        modelled[kernel.group] += kernel.count * (kernel.us(constants) + INSIDE * constants.gap)
    return [GROUP_WEIGHT * (us - groups[name]) / total for name, us in modelled.items()]


def _least_squares(residuals: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    at, damping = (low + high) / 2, 1e-2
    found = residuals(at)
    for _ in range(60):
        jacobian = np.stack([(residuals(at + 1e-4 * unit) - found) / 1e-4 for unit in np.eye(len(at))], 1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ found
        before = float(found @ found)
        while damping < 1e6:
            # a constant at its bound that wants to go on does not move, and the others take no account of it
            free = ~(((at <= low) & (slope > 0)) | ((at >= high) & (slope < 0)))
            step = np.zeros_like(at)
            square = normal[np.ix_(free, free)]
            step[free] = np.linalg.solve(
                square + damping * (np.diag(np.diag(square)) + 1e-9 * np.eye(len(square))), -slope[free]
            )
            moved = np.clip(at + step, low, high)
            after = residuals(moved)
            if float(after @ after) < before:
                break
            damping *= 4
        else:
            return at
        at, found, damping = moved, after, max(damping / 6, 1e-9)
        if before - float(found @ found) < 1e-5 * before:
            return at
    return at


def predictions(cells: Iterable[tuple[str, int, int]], constants: Constants) -> dict[tuple[str, int, int], float]:
    """Return the µs that the constants give for the form that was measured."""
    return {cell: pass_us(kernels_of(*cell, "fd6ca4a"), constants) for cell in cells}


def leave_one_out(measured: Measured) -> dict[tuple[str, int, int], float]:
    """Return predicted over measured latency of each cell, its model and size having had no part in the fit."""
    found = {}
    for subject in measured.subjects:
        constants = fit(measured.without(subject))
        cells = {cell: us for cell, us in measured.latencies.items() if cell[:2] == subject}
        found |= {cell: us / cells[cell] for cell, us in predictions(cells, constants).items()}
    return found
