"""Finds the image sizes that a model accepts for ``--dynamic-size``, and makes its graph fail at all others.

torch's exporter writes the model's arithmetic without its checks. A patch embedding in a graph crops 36 × 36 at a patch
of 8, where timm raises. So the accepted sizes are found by trial, and a `Reshape` that fails at any other size is put
at the graph's input.
"""

from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import nn

from vtk.card import InputSpec
from vtk.errors import UsageError

_STEP = 32  # of convolutional networks: their strides multiply to it
_MOST = 128
_REFUSALS = (AssertionError, RuntimeError, ValueError, IndexError, ZeroDivisionError)


class Sizes(NamedTuple):
    """Sizes that a model accepts, for height and width.

    Attributes:
        step: whole multiples of it.
        least: the smallest.
    """

    step: tuple[int, int] = (1, 1)
    least: tuple[int, int] = (1, 1)

    @property
    def free(self) -> bool:
        """Whether the model takes every size."""
        return max(*self.step, *self.least) == 1


def probe_sizes(model: nn.Module, spec: InputSpec) -> Sizes:
    """Find the sizes that a model accepts, one side at a time: refusals are quick, and few sizes are tried."""
    step: list[int] = []
    least: list[int] = []
    for axis in (0, 1):
        own = spec.size[axis]
        steps = [d for d in range(1, _MOST + 1) if _takes(model, spec, axis, own + d)][:1] or [own]
        small = [i * steps[0] for i in range(1, own // steps[0] + 1)] or [own]
        low, high = 0, len(small) - 1
        while low < high:  # sizes above one that it takes are taken
            middle = (low + high) // 2
            low, high = (low, middle) if _takes(model, spec, axis, small[middle]) else (middle + 1, high)
        step.append(steps[0])
        least.append(small[high])
    return Sizes((step[0], step[1]), (least[0], least[1]))


def _takes(model: nn.Module, spec: InputSpec, axis: int, side: int) -> bool:
    size = (side, spec.width) if axis == 0 else (spec.height, side)
    return runs(model, spec, size)


def runs(model: nn.Module, spec: InputSpec, size: tuple[int, int]) -> bool:
    """Return whether a model takes an image of a size."""
    try:
        with torch.inference_mode():
            model.eval()(torch.zeros(1, spec.in_chans, *size))
    except _REFUSALS:
        return False
    return True


def other_sizes(model: nn.Module, spec: InputSpec) -> tuple[tuple[int, int], ...]:
    """Return sizes, height first, to verify with: a little taller, wider and smaller by whole patches."""
    patch: Any = getattr(getattr(model, "patch_embed", None), "patch_size", _STEP)
    down, across = patch if isinstance(patch, tuple) else (patch, patch)
    smaller = max(spec.height - down, down), max(spec.width - across, across)
    return (spec.height + down, spec.width), (spec.height, spec.width + 2 * across), smaller


def odd_sizes(spec: InputSpec, sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Return sizes that a model may refuse: a pixel more, half a step less, and below the smallest."""
    (down, across), least = sizes.step, sizes.least
    found = (spec.height + 1, spec.width), (spec.height, spec.width + across // 2 + 1), (least[0] - 1, spec.width), (
        spec.height, max(least[1] - down, 1))  # fmt: skip
    return tuple(size for size in dict.fromkeys(found) if min(size) > 0)


def guard_sizes(proto: onnx.ModelProto, sizes: Sizes) -> None:
    """Make a graph fail at sizes that the model does not accept, in place.

    Two numbers, the sides, are reshaped to (2 + r, 1 + r), where r counts the pixels that are too many or too few; the
    images then take the shape that they have, from what came of it. OpenVINO drops a Reshape of one axis to one axis,
    and ONNX Runtime takes one unknown side of a concatenated shape for whatever fits.
    """
    if sizes.free:
        return
    graph = proto.graph
    name = f"images_are_multiples_of_{'x'.join(map(str, sizes.step))}_from_{'x'.join(map(str, sizes.least))}_on"

    def constant(key: str, values: list[int]) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), f"size_{key}"))
        return f"size_{key}"

    step, least = constant("step", list(sizes.step)), constant("least", list(sizes.least))
    none, two = constant("none", [0]), constant("two", [2, 1])
    images = graph.input[0].name
    nodes = [
        helper.make_node("Shape", [images], ["size_sides"], start=2, end=4),
        helper.make_node("Div", ["size_sides", step], ["size_whole"]),
        helper.make_node("Mul", ["size_whole", step], ["size_covered"]),
        helper.make_node("Sub", ["size_sides", "size_covered"], ["size_over"]),
        helper.make_node("Sub", [least, "size_sides"], ["size_lack"]),
        helper.make_node("Max", ["size_lack", none], ["size_short"]),
        helper.make_node("Add", ["size_over", "size_short"], ["size_wrong"]),
        helper.make_node("ReduceSum", ["size_wrong"], ["size_fault"], keepdims=1),
        helper.make_node("Add", ["size_fault", two], ["size_count"]),
        helper.make_node("Reshape", ["size_sides", "size_count"], ["size_checked"], name=name),
        # zero, added to the whole shape: so it stays known that the images have four axes
        helper.make_node("ReduceSum", ["size_checked"], ["size_total"], keepdims=0),
        helper.make_node("ReduceSum", ["size_sides"], ["size_sum"], keepdims=1),
        helper.make_node("Sub", ["size_total", "size_sum"], ["size_nothing"]),
        helper.make_node("Shape", [images], ["size_before"]),
        helper.make_node("Add", ["size_before", "size_nothing"], ["size_shape"]),
        helper.make_node("Reshape", [images, "size_shape"], ["size_images"], name="images_of_a_checked_size"),
    ]
    for node in graph.node:
        node.input[:] = ["size_images" if each == images else each for each in node.input]
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)


def check_sizes(model: nn.Module, spec: InputSpec, name: str) -> None:
    """Refuse a model that has one size.

    Raises:
        UsageError: names the model and why it cannot.
    """
    for size in other_sizes(model, spec):
        try:
            with torch.inference_mode():
                model.eval()(torch.zeros(1, spec.in_chans, *size))
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UsageError(
                f"`--dynamic-size`: {name} takes images of {spec.height}×{spec.width} only ({reason}); leave it "
                "out, or use a model created with dynamic_img_size"
            ) from error
