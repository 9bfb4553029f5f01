"""Checks the structure of a written ONNX file: card, opset, operators, types and shapes of inputs and outputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from vtk.card import Card
from vtk.errors import VerificationError
from vtk.runtime.export_facts import PLAIN, Facts
from vtk.runtime.onnx_file import open_onnx

Axes = Sequence[int | str]
"""Of a value: numbers, and names of symbolic axes."""


def verify_structure(
    path: Path,
    card: Card,
    *,
    opset: int,
    static_batch: int | None,
    inputs: Mapping[str, tuple[str, Axes]] | None = None,
    outputs: Mapping[str, tuple[str, Axes]] | None = None,
    ir_version: int | None = None,
    facts: Facts = PLAIN,
) -> None:
    """Parse the file and check opset, IR, names, types, axes, operators and the card.

    Args:
        path: the ONNX file.
        card: that was written into it.
        opset: of the standard domain.
        static_batch: None for a symbolic one named ``batch``.
        inputs: name to ONNX's type and the axes after the batch; by default fp32 ``pixel_values`` of the card's size.
        outputs: the same, by default fp32 ``logits`` of the card's classes.
        ir_version: None for any.
        facts: of the file; inputs and outputs are given in the toolkit's terms.

    Raises:
        VerificationError: the first thing that differs from the request.
    """
    spec = card.input
    inputs = inputs or {"pixel_values": ("FLOAT", (spec.in_chans, *spec.size))}
    outputs = outputs or {"logits": ("FLOAT", (len(card.classes),))}
    inputs, outputs = ({facts.name(term): entry for term, entry in each.items()} for each in (inputs, outputs))
    verify_graph(path, inputs, outputs, opset=opset, static_batch=static_batch, ir_version=ir_version)
    if open_onnx(path).card.to_json() != card.to_json():
        raise VerificationError("the card in the file's metadata is not the one that was written")


def verify_graph(
    path: Path,
    inputs: Mapping[str, tuple[str, Axes]],
    outputs: Mapping[str, tuple[str, Axes]],
    *,
    opset: int,
    static_batch: int | None,
    ir_version: int | None = None,
    whole: Mapping[str, tuple[str, Axes]] | None = None,
) -> None:
    """Check all that `verify_structure` does but the card; the arguments are the same.

    Args:
        whole: further inputs behind these, with all their axes: the first is not the batch.

    Raises:
        VerificationError: the first thing that differs from the request.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise VerificationError(f"onnx.checker refuses the file: {str(error).strip().splitlines()[0]}") from error
    proto = onnx.load(path, load_external_data=False)
    versions = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    if versions.get("ai.onnx") != opset:
        raise VerificationError(f"opset {opset} was asked for, the exporter wrote {versions}; choose that one")
    if ir_version is not None and proto.ir_version != ir_version:
        raise VerificationError(f"IR version {ir_version} was asked for, the file has {proto.ir_version}")
    if foreign := sorted({node.domain for node in proto.graph.node} - {"", "ai.onnx"}):
        raise VerificationError(f"the file has operators of {', '.join(foreign)}; only the standard domain is portable")
    batch: Axes = ["batch" if static_batch is None else static_batch]
    rows = {name: (dtype, (*batch, *axes)) for name, (dtype, axes) in inputs.items()}
    _check(proto.graph.input, {**rows, **(whole or {})})
    _check(proto.graph.output, {name: (dtype, (*batch, *axes)) for name, (dtype, axes) in outputs.items()})


def _check(entries: Sequence[onnx.ValueInfoProto], wanted: Mapping[str, tuple[str, Axes]]) -> None:
    if [entry.name for entry in entries] != list(wanted):
        names = " and ".join(f"`{name}`" for name in wanted)
        alone = " alone" if len(wanted) == 1 else ""
        raise VerificationError(f"expected {names}{alone}, the file has {[entry.name for entry in entries]}")
    for entry in entries:
        name, kind = entry.name, entry.type.tensor_type
        dtype, axes = wanted[name]
        if (found := onnx.TensorProto.DataType.Name(kind.elem_type)) != dtype:
            raise VerificationError(f"`{name}` is {found}, expected {dtype}")
        # a symbolic axis has a name and no number; ONNX allows an axis with neither
        shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]
        if shape != list(axes):
            raise VerificationError(f"`{name}` has the shape {shape} in the file, expected {list(axes)}")
