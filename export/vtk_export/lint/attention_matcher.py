"""Checks that attention has the form that TensorRT's fused-attention matcher recognises.

The form: q, k and v from three products, the scale on q or on k before their product, one Softmax over the last axis
between two MatMuls, nothing but casts in between, heads of 16 to 256 channels in steps of 8, in fp16 or bf16.

Sources: "Fused Attention" in NVIDIA's TensorRT documentation (scale before the first product, shapes, both scalings);
the restrictions on types and head size as quoted in NVIDIA/TensorRT issue 2981; a maximum subtracted by hand before
Softmax hides the pattern (tier4/autoware-ml pull request 95); products in fp32 are not fused at all
(Stability-AI/stable-audio-3 pull request 79). NVIDIA does not document a Softmax in fp32 between half-precision
products; reports say that it is fused, so its casts are accepted. Only the layers of a built engine can tell.
"""

from collections.abc import Iterator

import onnx
from onnx import TensorProto

from vtk_export.lint.finding import REFUSED, SLOW, Finding
from vtk_export.lint.graph_view import View, attribute, type_name
from vtk_export.targets import Target

HEAD_SIZES = range(16, 257, 8)
"""Channels of a head that the fused kernels have."""

_BETWEEN = frozenset({"Cast", "Identity", "Dropout", "QuantizeLinear", "DequantizeLinear"})
_MASKS = frozenset({"Add", "Where"})
_MOVES = _BETWEEN | {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather", "Flatten"}
_TURNS = frozenset({"Concat", "Neg"})
"""Of a rotary embedding: all parts that are put together come from one product."""
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv"})


def attention(view: View, target: Target) -> Iterator[Finding]:
    """Yield the reasons why an attention misses a fused kernel; other uses of Softmax are skipped."""
    for node in view.graph.node:
        if node.op_type == "Softmax":
            yield from _softmax(view, node)


def _softmax(view: View, softmax: onnx.NodeProto) -> Iterator[Finding]:
    after = _down(view, softmax)
    if after is None:
        return
    scores, scaled, shifted = _up_to_scores(view, softmax.input[0])
    if scores is None:
        return
    about = _Finder(view)
    rank = len(view.shape(softmax.input[0]) or ())
    if attribute(softmax, "axis", -1) not in (-1, rank - 1):
        yield about(softmax, "is not over the last axis", "let keys be the last axis of the scores", REFUSED)
    if view.type(softmax.input[0]) == TensorProto.BFLOAT16:
        yield about(
            softmax,
            "accumulates in bf16, with 8 bits of precision",
            "cast its input to FLOAT and its output back",
            REFUSED,
        )
    if scaled is not None:
        yield about(scaled, "scales the scores after the product of q and k", "scale q before the product")
    if shifted is not None:
        yield about(shifted, "subtracts the maximum before Softmax, which does so itself", "leave it out")
    q, k = (_trace(view, name) for name in scores.input[:2])
    v = _trace(view, after.input[1])
    if q.scale and k.scale:
        yield about(k.scale[0], "scales k, and q is scaled as well", "put the whole scale on q")
    names = [p.output[0] if p is not None else "" for p in (q.product, k.product, v.product)]
    if len(set(names)) < 3 or "" in names:
        yield about(scores, "does not compute q, k and v in three separate products",
                    "split the weights of the packed product in three, as --fuse does")  # fmt: skip
    dims = view.shape(scores.input[0])
    size = dims[-1] if dims else None
    if view.type(scores.input[0]) in (TensorProto.FLOAT16, TensorProto.BFLOAT16) and size not in (None, *HEAD_SIZES):
        yield about(scores, f"has heads of {size} channels, which no fused kernel supports",
                    "use heads of 16 to 256 channels, in steps of 8")  # fmt: skip


class _Finder:
    """Makes findings."""

    def __init__(self, view: View) -> None:
        self.view = view

    def __call__(self, node: onnx.NodeProto, problem: str, remedy: str, level: str = SLOW) -> Finding:
        name = node.name or node.output[0]
        return Finding(name, node.op_type, type_name(self.view.dtype(node)), problem, remedy, level)


def _down(view: View, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the product with v that reads a Softmax."""
    while True:
        readers = view.readers.get(node.output[0], [])
        if len(readers) != 1:
            return None
        value, node = node.output[0], readers[0]
        if node.op_type == "MatMul":
            return node if node.input[0] == value else None
        if node.op_type not in _BETWEEN:
            return None


def _up_to_scores(view: View, name: str) -> tuple[onnx.NodeProto | None, onnx.NodeProto | None, onnx.NodeProto | None]:
    """Return the product of q and k before a Softmax, and a scale and a subtracted maximum in between."""
    scaled = shifted = None
    while (node := view.makers.get(name)) is not None and node.op_type != "MatMul":
        if node.op_type in _BETWEEN:
            name = node.input[0]
        elif node.op_type in _MASKS:
            # the scores are the side that a product made, the mask the other
            sides = [n for n in node.input if _up_to_scores(view, n)[0] is not None]
            if not sides:
                return None, None, None
            name = sides[0]
        elif node.op_type in ("Mul", "Div"):
            scaled, name = node, _other(view, node)
        elif node.op_type == "Sub":
            shifted, name = node, node.input[0]
        else:
            return None, None, None
    return node, scaled, shifted


class _Origin:
    """Origin of a factor of attention: the product that computes it, and the scales in between."""

    def __init__(self, product: onnx.NodeProto | None, scale: list[onnx.NodeProto]) -> None:
        self.product, self.scale = product, scale


def _trace(view: View, name: str) -> _Origin:
    scale: list[onnx.NodeProto] = []
    while (node := view.makers.get(name)) is not None and node.op_type not in _PRODUCTS:
        if node.op_type in ("Mul", "Div", "Add"):
            name = _other(view, node)
            if node.op_type != "Add" and _is_scalar(view, next(n for n in node.input if n != name)):
                scale.append(node)
        elif node.op_type in _MOVES | _NORMS | _TURNS:
            name = node.input[0]
        else:
            return _Origin(None, scale)
    return _Origin(node, scale)


def _is_scalar(view: View, name: str) -> bool:
    """Return whether a value is one constant number; factors per channel are those of a norm."""
    shape = view.shape(name)
    return name in view.weights and shape is not None and all(n == 1 for n in shape)


def _other(view: View, node: onnx.NodeProto) -> str:
    """Return the input that is not a weight."""
    return node.input[1] if node.input[0] in view.weights else node.input[0]
