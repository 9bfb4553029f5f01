"""Builds the graph of a file: converts the model, and lowers the graph to the requested precision."""

import copy
from dataclasses import dataclass
from pathlib import Path

import onnx
from torch import nn

from vtk import console
from vtk.card import Card
from vtk.errors import UsageError
from vtk.runtime.export_facts import Facts
from vtk_export.gate.images import GateInputs
from vtk_export.gate.judge import Judgement
from vtk_export.gate.neighbours import Dependence
from vtk_export.gate.verify import GateRow
from vtk_export.graph.biased_products import bias_products, split_products
from vtk_export.graph.convert import choose_form, convert, explicit_attention, is_rotary
from vtk_export.graph.nonfinite import mark_rows
from vtk_export.graph.opset17 import lower
from vtk_export.graph.outputs import WithFeatures, append_softmax, output_names, split_classifier
from vtk_export.graph.precision import to_half
from vtk_export.graph.sizes import Sizes, check_sizes, probe_sizes
from vtk_export.onnx.quantize import to_fp8, to_int8
from vtk_export.onnx.spec import GateSpec, GraphSpec
from vtk_export.onnx.value_ranges import check_range
from vtk_export.output_folder import write

_RANGE_IMAGES = 8


@dataclass(frozen=True)
class File:
    """A written file, with what the gate needs and what it found.

    ``model`` is the reference in PyTorch, ``sizes`` are the accepted sizes where height and width are open.
    """

    path: Path
    model: nn.Module
    names: tuple[str, ...]
    facts: Facts
    fused: bool
    nodes: int
    rows: tuple[GateRow, ...] = ()
    judgement: Judgement | None = None
    dependence: Dependence | None = None
    sizes: Sizes | None = None

    def widths(self, card: Card) -> dict[str, int]:
        """Return the last axis of every output."""
        features = self.model.classifier_width if isinstance(self.model, WithFeatures) else 0
        return {name: features if name == "features" else len(card.classes) for name in self.names}


def build(
    model: nn.Module, inputs: GateInputs, spec: GraphSpec, options: GateSpec, folder: Path, *,
    divide_scores: bool | None = None,
) -> File:  # fmt: skip
    """Convert ``model``, lower it, and write it into ``folder``.

    Args:
        model: fp32, on the CPU.
        inputs: the card that is written into the file, and images: some show what is too large for fp16, those of
            ``--data`` calibrate int8 and fp8.
        spec: what the file is to be.
        options: how the graph is run on the way.
        folder: of the new files.
        divide_scores: of `vtk_export.graph.convert.export_form`; None: in fp32, unless for TensorRT.

    For TensorRT the graph has the form that its parser takes, and the opset of its version.

    Raises:
        UsageError: the model cannot give what was asked for.
        VerificationError: it cannot be converted, or a number is too large for the precision.
    """
    card = inputs.card
    if spec.softmax and card.multi_label:
        raise UsageError(
            "`--softmax` is for single-label models, and this one is multi-label; apply a sigmoid to each of its logits"
        )
    names = output_names(spec.output, softmax=spec.softmax)
    sizes = None
    if spec.dynamic_size:
        console.stage("testing which image sizes the model accepts")
        check_sizes(model, card.input, card.model.name)
        sizes = probe_sizes(model, card.input)
    if divide_scores is None:  # ONNX Runtime's fusion takes fp32 alone
        divide_scores = spec.dtype == "fp32" and not spec.for_tensorrt
    if spec.for_tensorrt:
        explicit_attention(model)
    form = {"vits": True, "divide_scores": divide_scores, "fixed_size": not spec.dynamic_size}
    if spec.output == "logits":
        graph = choose_form(model, spec.fuse, **form)
        fused = graph is not model
    else:
        model = split_classifier(model, logits=spec.output == "both")
        graph = WithFeatures(choose_form(model.body, spec.fuse, **form), model.classifier, model.classifier_width)
        fused = graph.body is not model.body
    raw = output_names(spec.output, softmax=False)
    console.stage(f"converting it to ONNX, opset {spec.opset}")
    proto = convert(graph, card.input, opset=spec.opset, static_batch=spec.static_batch, names=raw,
                    sizes=sizes)  # fmt: skip
    _check_resize(proto, spec)
    if spec.dtype == "fp32" and spec.int8 != "dynamic" and not spec.for_tensorrt:
        split_products(proto)
        if is_rotary(graph) and not spec.int8:  # in int8, a sum of its own costs less than two Reshapes
            bias_products(proto)
    del graph
    if spec.softmax:
        append_softmax(proto, card.temperature)
    proto.ir_version = spec.ir_version
    if spec.dtype == "fp8":
        console.stage("quantising the wide products to fp8")
        to_fp8(proto, card, spec, options, folder, inputs.given)
    if spec.dtype != "fp32":
        console.stage(f"converting the graph to {spec.rest}")
        plain = copy.deepcopy(proto)
        makers = to_half(proto, spec.rest, keep_io_types=spec.keep_io_types)
        check_range(plain, makers, card, inputs.images[:_RANGE_IMAGES], dtype=spec.rest, folder=folder,
                    threads=options.threads, static_batch=spec.static_batch)  # fmt: skip
        del plain
    elif spec.int8:
        console.stage(f"quantising to int8 ({spec.int8})")
        proto = to_int8(proto, card, spec, options, folder, inputs.given)
        mark_rows(proto, clean=spec.int8 == "dynamic")
        proto.ir_version = spec.ir_version
    facts = Facts(
        precision=spec.rest,
        int8=spec.int8 or "",
        fp8=spec.dtype == "fp8",
        keep_io_types=spec.keep_io_types,
        dynamic_size=spec.dynamic_size,
        target=spec.target,
        names={term: name for term, name in spec.names.items() if term in ("pixel_values", *names)},
    )
    if spec.file_opset < spec.opset:
        lower(proto, ir_version=spec.ir_version)
    nodes = len(proto.graph.node)
    return File(write(proto, card, folder, facts), model, names, facts, fused, nodes, sizes=sizes)


def _check_resize(proto: onnx.ModelProto, spec: GraphSpec) -> None:
    """Refuse a position embedding that is resampled at every call if the runtime cannot resample as torch does."""
    if spec.for_tensorrt and any(node.op_type == "Resize" for node in proto.graph.node):
        raise UsageError(
            f"{spec.target} cannot resample this model's position table, which --dynamic-size needs; leave it out"
        )
