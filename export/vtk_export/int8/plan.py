"""Quantises an fp32 graph to static int8 by a recipe: measures activations, equalises, chooses ranges, writes Q/DQ."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from torch import Tensor

from vtk.card import Card
from vtk.errors import VerificationError
from vtk_export.int8.activations import Activation, measure_activations
from vtk_export.int8.equalize import equalize
from vtk_export.int8.products import Group, constants, find_groups
from vtk_export.int8.qdq import insert
from vtk_export.int8.ranges import Scale, choose_scale
from vtk_export.int8.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """A graph whose activations were measured, ready to be written with any of its products in int8.

    Attributes:
        proto: fp32, equalised: its outputs are those of the original up to rounding.
        groups: of products that may be quantised.
        scales: of their activations.
        recipe: how it was made.
    """

    proto: onnx.ModelProto
    groups: tuple[Group, ...]
    scales: dict[str, Scale]
    recipe: Recipe

    def graph(self, kept: frozenset[str] = frozenset()) -> onnx.ModelProto:
        """Return the int8 graph, in which the groups of these activations stay in float."""
        groups = [group for group in self.groups if group.activation not in kept]
        return insert(self.proto, groups, self.scales)


def prepare(
    proto: onnx.ModelProto, batches: Iterable[Tensor], card: Card, recipe: Recipe, *, folder: Path, threads: int | None
) -> Plan:  # fmt: skip
    """Measure a graph's activations and choose their ranges.

    Args:
        proto: an fp32 graph with an input ``pixel_values``; it is not changed.
        batches: model inputs (B, C, H, W), of the graph's batch size.
        card: of the file.
        recipe: how.
        folder: where the graph may be written; nothing stays.
        threads: CPU threads.

    Raises:
        VerificationError: the graph has no product to quantise, or an activation is not finite.
    """
    groups = find_groups(proto.graph, attention=recipe.attention)
    if not groups:
        raise VerificationError("the graph has no product with a constant weight behind its first one, so int8 would "
                                "change nothing; export in fp32")  # fmt: skip
    axes = {group.activation: group.channels for group in groups}
    measured = measure_activations(proto, axes, batches, card, folder=folder, threads=threads)
    for name, own in measured.items():
        if not (np.isfinite(own.least).all() and np.isfinite(own.most).all()):
            raise VerificationError(f"the activation `{name}` is not finite on the calibration images, so it has no "
                                    "range; export in fp32")  # fmt: skip
    plain = onnx.ModelProto()
    plain.CopyFrom(proto)
    plain.graph.ClearField("value_info")
    if not measured:
        return Plan(plain, tuple(groups), {}, recipe)
    equalize(plain, groups, measured, recipe.equalize)
    weights = constants(plain.graph)
    scales = {
        group.activation: choose_scale(own.rows, own.least, own.most, _importance(group, weights, own), recipe)
        for group in groups for own in (measured[group.activation],)
    }  # fmt: skip
    return Plan(plain, tuple(groups), scales, recipe)


def quantize(
    proto: onnx.ModelProto, batches: Iterable[Tensor], card: Card, recipe: Recipe, *, folder: Path, threads: int | None
) -> onnx.ModelProto:  # fmt: skip
    """Return the int8 graph of an fp32 graph: `prepare`, and all products but those that the recipe keeps.

    The graph has QuantizeLinear and DequantizeLinear, as ONNX Runtime, OpenVINO and TensorRT read them.

    Raises:
        VerificationError: as of `prepare`.
    """
    return prepare(proto, batches, card, recipe, folder=folder, threads=threads).graph(recipe.kept)


def _importance(group: Group, weights: dict[str, np.ndarray], own: Activation) -> np.ndarray:
    """Return the squared length (C,) of what a group multiplies each channel by; of attention, ones."""
    total = np.zeros(len(own.least))
    for product in group.products:
        if product.weight:
            channel = 0 if product.axis == 1 else 1
            others = tuple(i for i in range(weights[product.weight].ndim) if i != channel)
            total += (weights[product.weight].astype(np.float64) ** 2).sum(others)
    return total if total.any() else np.ones_like(total)
