"""Chooses which products of an int8 graph stay in float, so that few images change their class."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from vtk.card import Card
from vtk_export.gate.verify import open_sessions
from vtk_export.int8.plan import Plan
from vtk_export.int8.products import Group, constants
from vtk_export.output_folder import save

RANKED = 32
"""Images that each group's effect is measured on, at most."""


@dataclass(frozen=True)
class Choice:
    """What a budget led to.

    Attributes:
        kept: activations whose products stay in float.
        changed: images whose class int8 changes.
        first: the same with all products in int8.
        count: images.
    """

    kept: frozenset[str]
    changed: int
    first: int
    count: int


def choose_kept(
    plan: Plan, batches: Sequence[Tensor], max_drop: float, card: Card, *, folder: Path, threads: int | None
) -> Choice:  # fmt: skip
    """Return the fewest groups to keep in float, in the order of their effect, with which the budget is held.

    A group's effect is the squared error of the outputs with only that group in int8, for each of its weights: what
    costs most accuracy for least time is kept first. How many of them is found by bisection.

    Args:
        plan: of the graph.
        batches: model inputs (B, C, H, W) of the graph's batch size, not those that it was calibrated on.
        max_drop: most images, in percent, whose class may change.
        card: of the file.
        folder: where graphs may be written; nothing stays.
        threads: CPU threads.

    Returns:
        The choice; with every group kept nothing changes.
    """
    run = _Runner(card, batches, folder, threads)
    exact, count = run(plan.proto), sum(map(len, batches))
    allowed = int(max_drop / 100 * count + 1e-9)

    def changed(kept: Sequence[str]) -> int:
        return int((run(plan.graph(frozenset(kept))).argmax(1) != exact.argmax(1)).sum())

    first = changed(())
    if first <= allowed:
        return Choice(frozenset(), first, first, count)
    order = _rank(plan, run, exact)
    few, enough, best = 0, len(order), 0
    while enough - few > 1:
        middle = (few + enough) // 2
        found = changed(order[:middle])
        if found <= allowed:
            enough, best = middle, found
        else:
            few = middle
    return Choice(frozenset(order[:enough]), best, first, count)


def _rank(plan: Plan, run: "_Runner", exact: Tensor) -> list[str]:
    """Return the activations of all groups, those with the largest effect for their weights first."""
    weights = constants(plan.proto.graph)
    names = [group.activation for group in plan.groups]
    effects = {}
    for group in plan.groups:
        alone = frozenset(name for name in names if name != group.activation)
        found = run(plan.graph(alone), RANKED)
        error = (found.double() - exact[: len(found)].double()).square().sum().item()
        effects[group.activation] = error / _size(group, weights)
    return sorted(names, key=lambda name: effects[name], reverse=True)


def _size(group: Group, weights: dict[str, np.ndarray]) -> int:
    return max(sum(weights[product.weight].size for product in group.products if product.weight), 1)


class _Runner:
    """Runs graphs on the same images."""

    def __init__(self, card: Card, batches: Sequence[Tensor], folder: Path, threads: int | None) -> None:
        self.card, self.batches, self.folder, self.threads = card, batches, folder, threads

    def __call__(self, proto: onnx.ModelProto, most: int | None = None) -> Tensor:
        """Return a graph's first output (N, classes) for the first ``most`` images, in whole batches."""
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        name = copy.graph.output[0].name
        place = self.folder / "choice"
        place.mkdir()
        try:
            path = save(copy, self.card, place)
            outputs: list[Tensor] = []
            with open_sessions(path, self.threads, optimize=(True,)) as (session,):
                for batch in self.batches:
                    if most is None or sum(map(len, outputs)) < most:
                        outputs.append(session.run({"pixel_values": batch})[name].float().cpu())
            return torch.cat(outputs)
        finally:
            shutil.rmtree(place)
