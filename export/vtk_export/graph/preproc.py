"""Builds the nodes of preprocessing: decoded images in, resized, cropped and normalised in the graph.

The nodes repeat `vtk.data.loading.eval_pipeline.eval_transform` (timm's resize and crop, Pillow's filters): sizes are
computed in integers as Pillow's callers do. Pillow filters one axis, rounds to uint8, and filters the other, so there
are two Resize nodes in Pillow's order, with ``exclude_outside``; onnxruntime's fixed-point arithmetic on uint8 equals
Pillow's, except that its weights are computed in single precision: a value between two levels may be rounded to the
other one. All images of a batch have the same size, which may change from batch to batch.
"""

import math
from typing import Any

import numpy as np
import onnx
import PIL
from onnx import TensorProto, helper, numpy_helper

from vtk.card import InputSpec
from vtk.errors import UsageError

_FILTERS = {"bicubic": "cubic", "bilinear": "linear"}  # of nearest, Pillow and ONNX choose other pixels

RAW_TYPES = {
    "": "UINT8", "int8": "INT8", "uint16": "UINT16", "int16": "INT16", "uint32": "UINT32", "int32": "INT32",
    "float16": "FLOAT16", "float32": "FLOAT", "float64": "DOUBLE",
}  # fmt: skip
"""ONNX's name of the type of raw images, by the ``value_type`` of a card: bytes where training images had 8 bits."""

CHOOSES_ORDER = int(PIL.__version__.partition(".")[0]) >= 13
"""Whether this Pillow may filter rows before columns, which rounds differently (its pull request 9549)."""


def check_preproc(spec: InputSpec) -> None:
    """Refuse models whose preprocessing the nodes cannot do.

    Raises:
        UsageError: says what, and that a server's ensemble or the client can do it.
    """
    if spec.in_chans != 3:
        raise UsageError(
            f"`--with-preproc` is for RGB models, this one takes {spec.in_chans} channel(s); leave it out, and prepare "
            "images in the client or in a server ensemble"
        )
    if spec.interpolation not in _FILTERS:
        raise UsageError(
            f"`--with-preproc` cannot resize by `{spec.interpolation}`, only by {', '.join(_FILTERS)}; leave it out, "
            "and prepare images in the client or in a server ensemble"
        )


def prepend(proto: onnx.ModelProto, spec: InputSpec) -> None:
    """Put resizing, cropping and normalising before ``pixel_values``, in place.

    The graph's input becomes ``images``, (batch, height, width, 3) of any size, RGB: uint8, or of the type of a model
    with a value range, whose LOW and HIGH become 0 and 255 first.
    """
    graph = proto.graph
    (old,) = [value for value in graph.input if value.name == "pixel_values"]
    batch = old.type.tensor_type.shape.dim[0]
    axis = batch.dim_value if batch.HasField("dim_value") else batch.dim_param
    builder = _Nodes(old.type.tensor_type.elem_type)
    builder.build(spec)
    graph.input.remove(old)
    kind = getattr(TensorProto, RAW_TYPES[spec.value_type])
    graph.input.append(helper.make_tensor_value_info("images", kind, [axis, "height", "width", 3]))
    nodes = [*builder.nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(builder.constants.values())


class _Nodes:
    """Builder of the nodes; every method adds one and returns the name of its value."""

    def __init__(self, out_type: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.out_type = out_type

    def build(self, spec: InputSpec) -> None:
        pixels = self.add("Transpose", self.levels(spec), perm=[0, 3, 1, 2])
        shape = self.add("Shape", pixels)
        height, width = self.at(shape, 2), self.at(shape, 3)
        out = spec.size
        rows, columns = self.sizes(spec, height, width)
        one_axis = self.first_pass(height, width, rows, columns)
        for side in (one_axis, (rows, columns)):
            sizes = self.add("Concat", self.at(shape, 0), self.ints(3), *side, axis=0)
            pixels = self.resize(pixels, sizes, spec.interpolation)
        # in numbers from 0 to 1, as the mean and std of the card are
        values = self.add("Cast", pixels, to=TensorProto.FLOAT)
        if spec.resize_mode == "pad":
            values = self.pad(values, spec, rows, columns)
        elif spec.resize_mode == "crop":
            values = self.crop(values, rows, columns, out)
        scale = 255 * np.array(spec.std, np.float64)
        values = self.add("Sub", values, self.floats(255 * np.array(spec.mean, np.float64)))
        last = "pixel_values" if self.out_type == TensorProto.FLOAT else None
        values = self.add("Div", values, self.floats(scale), name=last)
        if last is None:
            self.add("Cast", values, to=self.out_type, name="pixel_values")

    def levels(self, spec: InputSpec) -> str:
        """Return the images in 8 bits: as `vtk.data.decoding.pixels.scaled`, in double precision."""
        if not spec.value_range:
            return "images"
        low, high = (np.array([pair[i] for pair in spec.value_range], np.float64).reshape(1, 1, 1, -1) for i in (0, 1))
        values = self.add("Cast", "images", to=TensorProto.DOUBLE)
        if spec.value_type.startswith("float"):
            values = self.add("Where", self.add("IsNaN", values), self.constant(low), values)
        values = self.add("Mul", self.add("Sub", values, self.constant(low)), self.constant(255.0 / (high - low)))
        ends = self.constant(np.array(0.0)), self.constant(np.array(255.0))
        return self.add("Cast", self.add("Clip", self.add("Round", values), *ends), to=TensorProto.UINT8)

    def sizes(self, spec: InputSpec, height: str, width: str) -> tuple[str, str]:
        """Return the size to resize to, as one number each."""
        if spec.resize_mode == "squash":
            return self.ints(spec.height), self.ints(spec.width)
        if spec.resize_mode == "pad":
            by = self.add("Min", self.ratio(spec.height, height), self.ratio(spec.width, width))
            return self.scaled(height, by), self.scaled(width, by)
        cover = [math.floor(side / spec.crop_pct) for side in spec.size]
        if cover[0] == cover[1]:  # torchvision's Resize of the shorter side
            short = self.add("Min", height, width)
            return tuple(self.add("Div", self.add("Mul", side, self.ints(cover[0])), short)
                         for side in (height, width))  # type: ignore[return-value]  # fmt: skip
        # timm's ResizeKeepRatio: round(side / ratio), of double precision numbers
        ratio = self.add("Min", self.over(height, cover[0]), self.over(width, cover[1]))
        return tuple(self.rounded(self.add("Div", self.double(side), ratio))
                     for side in (height, width))  # type: ignore[return-value]  # fmt: skip

    def ratio(self, target: int, side: str) -> str:
        return self.add("Div", self.doubles(target), self.double(side))

    def over(self, side: str, target: int) -> str:
        return self.add("Div", self.double(side), self.doubles(target))

    def scaled(self, side: str, by: str) -> str:
        return self.add("Max", self.rounded(self.add("Mul", self.double(side), by)), self.ints(1))

    def first_pass(self, height: str, width: str, rows: str, columns: str) -> tuple[str, str]:
        """Return the size after Pillow's first pass, which filters one axis only.

        Pillow 13 filters the height first where that takes away more than twice the pixels that the width loses;
        all before filter the width first.
        """
        if not CHOOSES_ORDER:
            return height, columns
        lower, narrower = self.add("Sub", height, rows), self.add("Sub", width, columns)
        vertical = self.add(
            "And", self.add("Greater", lower, self.ints(0)),
            self.add("Greater", lower, self.add("Mul", narrower, self.ints(2))),
        )  # fmt: skip
        return self.add("Where", vertical, rows, height), self.add("Where", vertical, width, columns)

    def resize(self, pixels: str, sizes: str, interpolation: str) -> str:
        mode = _FILTERS[interpolation]
        # Pillow's bicubic filter is Keys' with a = -0.5, ONNX's default is -0.75
        options: dict[str, Any] = {"cubic_coeff_a": -0.5} if mode == "cubic" else {}
        return self.add(
            "Resize", pixels, "", "", sizes,
            mode=mode, coordinate_transformation_mode="half_pixel", antialias=1, exclude_outside=1, **options,
        )  # fmt: skip

    def crop(self, values: str, rows: str, columns: str, out: tuple[int, int]) -> str:
        """Cut the centre, from round((side - out) / 2) on: halves go to the even number, in ONNX as in Python."""
        starts = [
            self.rounded(self.add("Div", self.double(self.add("Sub", side, self.ints(wanted))), self.doubles(2)))
            for side, wanted in ((rows, out[0]), (columns, out[1]))
        ]
        start = self.add("Concat", *starts, axis=0)
        end = self.add("Add", start, self.ints(*out))
        return self.add("Slice", values, start, end, self.ints(2, 3))

    def pad(self, values: str, spec: InputSpec, rows: str, columns: str) -> str:
        """Pad with the mean colour, the odd pixel to the right and below."""
        fill = self.floats(np.round(255 * np.array(spec.mean, np.float64)))
        before, after = [], []
        for side, wanted in ((rows, spec.height), (columns, spec.width)):
            left = self.add("Sub", self.ints(wanted), side)
            before.append(self.add("Div", left, self.ints(2)))
            after.append(self.add("Sub", left, before[-1]))
        pads = self.add("Concat", self.ints(0, 0), *before, self.ints(0, 0), *after, axis=0)
        # Pad has one value for all channels, so that it is taken away first and given back afterwards
        return self.add("Add", self.add("Pad", self.add("Sub", values, fill), pads), fill)

    def add(self, op: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        output = name or f"pre_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=f"preprocess_{len(self.nodes)}",
                                           **attributes))  # fmt: skip
        return output

    def at(self, shape: str, place: int) -> str:
        return self.add("Slice", shape, self.ints(place), self.ints(place + 1))

    def double(self, whole: str) -> str:
        return self.add("Cast", whole, to=TensorProto.DOUBLE)

    def rounded(self, value: str) -> str:
        return self.add("Cast", self.add("Round", value), to=TensorProto.INT64)

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def doubles(self, value: float) -> str:
        return self.constant(np.array([value], np.float64))

    def floats(self, channels: np.ndarray) -> str:
        return self.constant(channels.astype(np.float32).reshape(1, -1, 1, 1))

    def constant(self, value: np.ndarray) -> str:
        tensor = numpy_helper.from_array(value)
        for name, known in self.constants.items():
            if (known.dims, known.data_type, known.raw_data) == (tensor.dims, tensor.data_type, tensor.raw_data):
                return name
        tensor.name = f"pre_constant_{len(self.constants)}"
        self.constants[tensor.name] = tensor
        return tensor.name
