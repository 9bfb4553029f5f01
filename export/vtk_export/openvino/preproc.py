"""``--with-preproc``: prepends resizing, cropping and normalising to an OpenVINO model, by its ``PrePostProcessor``.

The steps repeat `vtk.data.loading.eval_pipeline.eval_transform`. OpenVINO filters as Pillow does
(``BICUBIC_PILLOW``, ``BILINEAR_PILLOW``), in 8 bits. Its resize step knows fixed sizes only, so a custom step computes
Pillow's from each image. It does so in integers: the CPU plugin computes floating-point numbers in single precision, or
in bf16.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk_export.graph.preproc import CHOOSES_ORDER, check_preproc

if TYPE_CHECKING:
    from openvino import Model

_FILTERS = {"bicubic": "bicubic_pillow", "bilinear": "bilinear_pillow"}
_ROWS, _COLUMNS = 1, 2
"""Axes of raw images."""


def check(spec: InputSpec) -> None:
    """Refuse models whose preprocessing the steps cannot do.

    Raises:
        UsageError: says what, and that the client can do it.
    """
    check_preproc(spec)
    if spec.value_range:
        raise UsageError(
            f"`--with-preproc` takes 8-bit images, this model's have {spec.value_type} values, which OpenVINO would "
            "bring to 8 bits in single precision; leave it out, and prepare images in the client"
        )


def prepend(model: "Model", spec: InputSpec, static_batch: int | None, name: str = "images") -> "Model":
    """Return the model with preprocessing before its one input.

    That input becomes ``name``, uint8 RGB (batch, height, width, 3) of any size.
    """
    from openvino import Layout, PartialShape, Type
    from openvino.preprocess import PrePostProcessor

    process = PrePostProcessor(model)
    image = process.input()
    image.tensor().set_element_type(Type.u8).set_layout(Layout("NHWC"))
    image.tensor().set_shape(PartialShape([static_batch or -1, -1, -1, 3]))
    image.model().set_layout(Layout("NCHW"))
    steps = image.preprocess()
    steps.custom(lambda pixels: _Steps(spec).resized(pixels).output(0))
    steps.convert_element_type(Type.f32)
    steps.mean([255 * value for value in spec.mean]).scale([255 * value for value in spec.std])
    built = process.build()
    built.input(0).get_tensor().set_names({name})
    built.input(0).get_node().set_friendly_name(name)
    return built


class _Steps:
    """Nodes that resize and crop; sides of images are nodes of shape (1,), int64."""

    def __init__(self, spec: InputSpec) -> None:
        import openvino.opset13 as operators

        self.spec, self.op = spec, operators

    def resized(self, pixels: Any) -> Any:
        """Return raw images (batch, height, width, 3) uint8 in the size of the model."""
        spec, shape = self.spec, self.op.shape_of(pixels)
        height, width = (self.op.gather(shape, self.ints(axis), self.ints(0)) for axis in (_ROWS, _COLUMNS))
        rows, columns = self.sizes(height, width)
        for size in (self.first_pass(height, width, rows, columns), (rows, columns)):
            pixels = self.op.interpolate(
                pixels, self.op.concat(list(size), 0), _FILTERS[spec.interpolation], "sizes",
                axes=np.array([_ROWS, _COLUMNS], np.int64), cube_coeff=-0.5,  # Keys' filter, as Pillow's
            )  # fmt: skip
        if spec.resize_mode == "pad":
            return self.padded(pixels, rows, columns)
        return self.cropped(pixels, rows, columns) if spec.resize_mode == "crop" else pixels

    def sizes(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Return the size to resize to."""
        spec, sides = self.spec, (height, width)
        if spec.resize_mode == "squash":
            return self.ints(spec.height), self.ints(spec.width)
        cover = spec.size if spec.resize_mode == "pad" else [math.floor(side / spec.crop_pct) for side in spec.size]
        if spec.resize_mode == "crop" and cover[0] == cover[1]:
            short = self.op.minimum(height, width)  # torchvision's Resize of the shorter side cuts the fraction off
            rows, columns = (self.divided(self.times(side, cover[0]), short) for side in sides)
            return rows, columns
        # an image that is padded fits into the size, one that is cropped covers it
        lower = self.op.less_equal(self.times(width, cover[0]), self.times(height, cover[1]))
        by_height = lower if spec.resize_mode == "pad" else self.op.logical_not(lower)
        across = self.op.select(by_height, height, width)
        target = self.op.select(by_height, self.ints(cover[0]), self.ints(cover[1]))
        rows, columns = (
            self.op.maximum(self.rounded(self.op.multiply(side, target), across), self.ints(1)) for side in sides
        )
        return rows, columns

    def first_pass(self, height: Any, width: Any, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Return the size after Pillow's first pass, which filters one axis only (`vtk_export.graph.preproc`)."""
        if not CHOOSES_ORDER:
            return height, columns
        lower, narrower = self.op.subtract(height, rows), self.op.subtract(width, columns)
        vertical = self.op.logical_and(
            self.op.greater(lower, self.ints(0)), self.op.greater(lower, self.times(narrower, 2))
        )
        return self.op.select(vertical, rows, height), self.op.select(vertical, width, columns)

    def cropped(self, pixels: Any, rows: Any, columns: Any) -> Any:
        """Cut the centre, from round((side - out) / 2) on: halves go to the even number, as in Python."""
        starts = [
            self.rounded(self.op.subtract(side, self.ints(wanted)), self.ints(2))
            for side, wanted in zip((rows, columns), self.spec.size, strict=True)
        ]
        start = self.op.concat(starts, 0)
        end = self.op.add(start, self.ints(*self.spec.size))
        return self.op.slice(pixels, start, end, self.ints(1, 1), self.ints(_ROWS, _COLUMNS))

    def padded(self, pixels: Any, rows: Any, columns: Any) -> Any:
        """Pad with the mean colour, the odd pixel to the right and below."""
        fill = np.round(255 * np.array(self.spec.mean, np.float64)).astype(np.int32).reshape(1, 1, 1, -1)
        before, after = [], []
        for side, wanted in zip((rows, columns), self.spec.size, strict=True):
            lack = self.op.subtract(self.ints(wanted), side)
            before.append(self.divided(lack, self.ints(2)))
            after.append(self.op.subtract(lack, before[-1]))
        none = self.ints(0)
        pads = [self.op.concat([none, *sides, none], 0) for sides in (before, after)]
        # Pad has one value for all channels, so that it is taken away first and given back afterwards
        values = self.op.subtract(self.op.convert(pixels, "i32"), self.op.constant(fill))
        return self.op.add(self.op.pad(values, *pads, "constant", np.int32(0)), self.op.constant(fill))

    def rounded(self, number: Any, divisor: Any) -> Any:
        """Return number / divisor, rounded to integers, halves to even ones; none is negative."""
        twice = self.times(divisor, 2)
        whole = self.divided(self.op.add(self.times(number, 2), divisor), twice)
        rest = self.op.subtract(self.op.add(self.times(number, 2), divisor), self.op.multiply(whole, twice))
        odd = self.op.subtract(whole, self.times(self.divided(whole, self.ints(2)), 2))
        return self.op.subtract(whole, self.op.select(self.op.equal(rest, self.ints(0)), odd, self.ints(0)))

    def divided(self, number: Any, divisor: Any) -> Any:
        """Return the whole part of number / divisor; the plugin divides in single precision, so it may be one off."""
        whole = self.op.divide(number, divisor)
        rest = self.op.subtract(number, self.op.multiply(whole, divisor))
        few, many = self.op.greater_equal(rest, divisor), self.op.less(rest, self.ints(0))
        return self.op.add(whole, self.op.select(few, self.ints(1), self.op.select(many, self.ints(-1), self.ints(0))))

    def times(self, side: Any, factor: int) -> Any:
        return self.op.multiply(side, self.ints(factor))

    def ints(self, *values: int) -> Any:
        return self.op.constant(np.array(values, np.int64))
