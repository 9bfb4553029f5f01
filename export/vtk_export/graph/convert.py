"""Converts a torch model to an ONNX graph with torch's dynamo exporter.

It was preferred to a writer of our own and to optimum (which needs an old transformers): it follows torch's operators,
writes a symbolic batch, and needs only onnxscript.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import Tensor, nn

from vtk import console
from vtk.card import InputSpec
from vtk.errors import UsageError, VerificationError
from vtk.fused import fuse, separate_qkv
from vtk.fused.families.registry import READERS
from vtk.fused.model import FusedViT
from vtk.packages import require
from vtk_export.graph.attention_rank import four_axes
from vtk_export.graph.rewrite import complete_norms, reorder_bias, reorder_gelu
from vtk_export.graph.rms_norms import divide_rms_norms
from vtk_export.graph.sizes import Sizes, guard_sizes


def is_parallel(model: nn.Module) -> bool:
    """Return whether a model has parallel branches (Touvron et al. 2022): merging them halves the number of nodes."""
    return any(isinstance(m, ParallelThingsBlock) and m.num_parallel > 1 for m in model.modules())


def is_rotary(graph: nn.Module) -> bool:
    """Return whether a form to export has rotary tables."""
    return any(isinstance(module, FusedViT) and module.rotary is not None for module in graph.modules())


def choose_form(
    model: nn.Module, fuse: bool | None, *, vits: bool = False, divide_scores: bool = True, fixed_size: bool = True
) -> nn.Module:  # fmt: skip
    """Return the model to export: its `export_form`, or itself.

    Args:
        model: the model.
        fuse: True asks for `export_form`, False for the model; None gives the first to models with parallel branches.
        vits: None gives it to every model of a family that `fuse` knows.
        divide_scores, fixed_size: of `export_form`.

    Raises:
        UsageError: asked for, and a part of the model cannot be fused. Unasked, that is said, and the model returned.
    """
    if fuse or (
        fuse is None and (is_parallel(model) or (vits and isinstance(model, tuple(reader.kind for reader in READERS))))
    ):
        try:
            return export_form(model, divide_scores=divide_scores, fixed_size=fixed_size)
        except UsageError as error:
            if fuse:
                raise
            console.say(f"exported unfused: {str(error).partition(';')[0]}")
    return model


def export_form(model: nn.Module, *, divide_scores: bool = True, fixed_size: bool = True) -> nn.Module:
    """Return the folded, merged model with one node per norm and q, k and v as three products.

    That is the form that the attention fusions of ONNX Runtime and TensorRT look for; only standard operators are used.
    They differ in where the softmax scale stands. `onnxruntime.transformers.optimizer` knows scores that are divided by
    √D, and takes a quotient that it does not see for granted; TensorRT's documentation has the scale on q.

    Args:
        model: a Vision Transformer.
        divide_scores: divide the scores, as ONNX Runtime wants it; False to leave 1/√D in q's weights, which TensorRT
            wants and which keeps fp16 scores small.
        fixed_size: height and width are the model's own, and so are a rotary embedding's tables, which are constants.

    Raises:
        UsageError: a part of the model cannot be fused; it is named.
    """
    fused = fuse(model, keep_source=False)
    if fused.rotary is not None and not fixed_size:
        raise UsageError(
            "a fused file of this model has its rotary tables as constants of one size; leave out --fuse or "
            "--dynamic-size"
        )
    separate_qkv(fused, divide_scores=divide_scores)
    return fused


def explicit_attention(model: nn.Module) -> None:
    """Replace timm's fused attention by two products, in place, for TensorRT.

    torch's exporter writes scaled_dot_product_attention with shapes that it computes and a scale on both sides.
    """
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010 - nn.Module's attributes are tensors to mypy


def convert(
    model: nn.Module,
    spec: InputSpec,
    *,
    opset: int,
    static_batch: int | None = None,
    names: Sequence[str] = ("logits",),
    more: Mapping[str, Tensor] | None = None,
    sizes: Sizes | None = None,
    stacks: Mapping[str, tuple[Tensor, Mapping[int, str]]] | None = None,
) -> onnx.ModelProto:
    """Run torch's exporter, quietly, and return the model with its weights.

    Args:
        model: in eval mode, fp32, on the CPU.
        spec: size of the input.
        opset: to ask the exporter for; it may give another one, which `verify_structure` notices.
        static_batch: fixed batch size, None for a symbolic one named ``batch``.
        names: of the outputs.
        more: further inputs, name to an example (batch, …); of a batch of two, or of the fixed size.
        sizes: leave height and width open, as axes of these names; at others than these sizes the graph fails.
        stacks: last inputs, which the model takes as a list: name to an example and the names of its open axes.

    Raises:
        VerificationError: the exporter cannot convert the model.
    """
    require("onnxscript")  # torch's exporter is written in it
    # with a batch of one, torch.export would take the batch for a constant
    # and with a square image, height and width for one number
    width = 2 * spec.width if sizes else spec.width
    example = torch.zeros(static_batch or 2, spec.in_chans, spec.height, width)
    inputs = {"pixel_values": example, **(more or {})}
    batch = {} if static_batch else {0: torch.export.Dim("batch")}
    sides = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC} if sizes else {}
    shapes: tuple[Any, ...] = tuple({**batch, **(sides if name == "pixel_values" else {})} for name in inputs)
    values: tuple[Any, ...] = tuple(inputs.values())
    if stacks:
        values += ([example for example, _ in stacks.values()],)
        shapes += ([dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for _, axes in stacks.values()],)
    try:
        with silence(), four_axes():
            program = torch.onnx.export(
                model.eval().requires_grad_(False), values, dynamo=True, verbose=False,
                opset_version=opset, input_names=[*inputs, *(stacks or ())], output_names=list(names),
                dynamic_shapes=shapes if any(shapes) else None,
            )  # fmt: skip
            if program is None:
                raise RuntimeError("it returned nothing")
            proto: onnx.ModelProto = program.model_proto
    except Exception as error:  # torch.export and onnxscript raise whatever the operator at hand raises
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise VerificationError(f"torch's ONNX exporter cannot convert {type(model).__name__}: {reason}") from error
    _strip(proto.graph)
    _forget_weights(proto.graph)
    reorder_gelu(proto.graph)
    reorder_bias(proto.graph)
    complete_norms(proto.graph)
    divide_rms_norms(proto)
    if sizes:
        _name_sides(proto.graph)
        guard_sizes(proto, sizes)
    if stacks:
        _name_axes(proto.graph, {name: axes for name, (_, axes) in stacks.items()})
    return proto


def _name_axes(graph: onnx.GraphProto, names: Mapping[str, Mapping[int, str]]) -> None:
    """Name the open axes of inputs, and of outputs; drop intermediate shapes, where torch numbers them."""
    given: dict[str, str] = {}
    for value in graph.input:
        for i, axis in names.get(value.name, {}).items():
            dim = value.type.tensor_type.shape.dim[i]
            if dim.HasField("dim_value"):
                raise VerificationError(
                    f"the {axis} of `{value.name}` became the constant {dim.dim_value} in the graph"
                )
            given[dim.dim_param] = axis
            dim.dim_param = axis
    for value in graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in given:
                dim.dim_param = given[dim.dim_param]
    graph.ClearField("value_info")


def _name_sides(graph: onnx.GraphProto) -> None:
    """Name the axes ``height`` and ``width``; drop intermediate shapes, where torch numbers them."""
    dims = graph.input[0].type.tensor_type.shape.dim
    for dim, name in zip(dims[2:], ("height", "width"), strict=True):
        if dim.HasField("dim_value"):
            raise VerificationError(
                f"the model's {name} became the constant {dim.dim_value} in the graph; leave out --dynamic-size"
            )
        dim.dim_param = name
    graph.ClearField("value_info")


def _forget_weights(graph: onnx.GraphProto) -> None:
    """Drop the exporter's shapes of weights, which have their own shape.

    A tool that turns a weight round, as ONNX Runtime's quantiser does, would find the old shape wrong.
    """
    weights = {tensor.name for tensor in graph.initializer}
    kept = [value for value in graph.value_info if value.name not in weights]
    graph.ClearField("value_info")
    graph.value_info.extend(kept)


def _strip(graph: onnx.GraphProto) -> None:
    """Drop the exporter's metadata of every node: stack traces with paths of this machine."""
    for entry in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        entry.ClearField("metadata_props")
        entry.ClearField("doc_string")
    graph.ClearField("metadata_props")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _strip(inner)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress the exporter's prints, warnings and log lines: stdout may be a JSON object."""
    level = logging.root.manager.disable
    noise = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
