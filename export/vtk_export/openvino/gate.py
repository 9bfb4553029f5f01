"""Verifies a written OpenVINO model against torch: structure, and values in each precision of this processor."""

import dataclasses
import math
from collections.abc import Sequence

from torch import Tensor

from vtk import console
from vtk.card import Card
from vtk.data.decoding.decode import pixel_limit
from vtk.errors import DataError, VerificationError
from vtk.runtime.ir_graph import Value
from vtk.runtime.openvino_file import load_graph, open_openvino
from vtk.runtime.photographs import Photographs
from vtk_export.gate.drift import Drift
from vtk_export.gate.images import GateInputs, card_images, judged_images
from vtk_export.gate.judge import Judgement, check_judgement, judge
from vtk_export.gate.limits import Limits, with_budget
from vtk_export.gate.neighbours import Dependence, black_image, check_dependence, measure, rounding
from vtk_export.gate.openvino_sessions import limits_in, opener
from vtk_export.gate.verify import GateRow, Sessions, check_rows, run_session, verify_values
from vtk_export.graph.sizes import other_sizes
from vtk_export.onnx.build import File
from vtk_export.onnx.gate import check_odd_sizes
from vtk_export.onnx.preproc_gate import check_drift, measure_drift
from vtk_export.onnx.spec import GateSpec, GraphSpec


@dataclasses.dataclass(frozen=True)
class Verified:
    """Results of one precision.

    Attributes:
        precision: of the products: ``fp32`` or ``bf16``; int8 products stay int8 in both.
        rows: per batch size and output.
        dependence: of an image's outputs on its neighbours.
        judgement: on the images of ``--data``, None without, and of fp32.
        drift: of the preprocessing in the model, None without.
    """

    precision: str
    rows: tuple[GateRow, ...]
    dependence: Dependence
    judgement: Judgement | None = None
    drift: Drift | None = None


def limits_of(file: File, precision: str) -> Limits:
    """Return the bounds of a file's outputs in a precision."""
    return limits_in(file.facts.kind, precision)


def verify_structure(file: File, card: Card, spec: GraphSpec) -> None:
    """Check names, types and shapes of the inputs and outputs of a file, and its card.

    Raises:
        VerificationError: the first thing that differs from the request.
    """
    try:
        written, graph = open_openvino(file.path), load_graph(file.path)
    except DataError as error:
        raise VerificationError(str(error)) from error
    batch, sides = spec.static_batch, (None, None) if spec.dynamic_size else card.input.size
    if file.facts.preprocessing:
        image = Value((file.facts.name("images"),), "U8", (batch, None, None, 3))
    else:
        image = Value((file.facts.name("pixel_values"),), "FP32", (batch, card.input.in_chans, *sides))
    outputs = tuple(
        Value((file.facts.name(name),), "FP32", (batch, width)) for name, width in file.widths(card).items()
    )
    for found, expected in zip((*graph.inputs, *graph.outputs), (image, *outputs), strict=True):
        if found != expected:
            raise VerificationError(f"the model has {found}, expected {expected}")
    if written.card.to_json() != card.to_json() or written.facts != file.facts:
        raise VerificationError("card or facts in the metadata of the model are not those that were written")


def verify(
    file: File, inputs: GateInputs, spec: GraphSpec, options: GateSpec, precision: str, *, show: bool
) -> Verified:  # fmt: skip
    """Run the gate in one precision, and return the results, or raise.

    Args:
        file: without preprocessing.
        inputs: images to verify with.
        spec: what the file is to be.
        options: how it is verified.
        precision: ``fp32`` or ``bf16``.
        show: print the table; a failure's is always printed.

    Raises:
        VerificationError: the values of the file are not torch's.
    """
    limits, sessions = limits_of(file, precision), opener(file.path, precision, options.threads)
    console.stage(f"comparing the file in {precision} with PyTorch at {len(inputs.batches)} batch sizes")
    rows, remarks = verify_values(
        file.path, file.model, inputs.images, batches=inputs.batches, names=file.names, limits=limits,
        sessions=sessions, temperature=inputs.card.temperature,
    )  # fmt: skip
    rows += _other_rows(file, inputs, spec, options, limits, sessions)
    if show or not all(row.passed for row in rows):
        print_rows(rows, precision)
        for line in (f"verified with {inputs.what}", *remarks):
            console.say(line)
    check_rows(rows)
    with sessions() as (session,):
        dependence = measure(
            lambda images: run_session(session, images, file.names), inputs.images, static_batch=spec.static_batch,
            black=black_image(inputs.card.input), names=file.names,
        )  # fmt: skip
    bound = rounding(limits)
    if show or not dependence.relative <= bound:
        console.say(dependence.describe(bound))
    check_dependence(dependence, bound)
    result = Verified(precision, tuple(rows), dependence)
    if (file.facts.kind, precision) == ("fp32", "fp32") or file.names == ("features",):
        return result
    if inputs.given is None:
        kind = "int8" if file.facts.int8 else precision
        console.say(f"accuracy not measured; give --data to measure top-1 agreement in {kind} on images")
        return result
    chosen = judged_images(inputs.given, file.facts, spec.max_drop)
    photographs = Photographs(chosen, options.images, max_pixels=pixel_limit(inputs.card))
    console.stage(f"measuring top-1 agreement in {precision} on {len(photographs.paths)} images")
    judgement = judge(file.path, file.model, photographs, inputs.card.input, names=file.names, threads=options.threads,
                      sessions=sessions, temperature=inputs.card.temperature)  # fmt: skip
    console.say(f"{precision}: {judgement.describe()}")
    check_judgement(judgement, with_budget(limits, spec.max_drop))
    return dataclasses.replace(result, judgement=judgement)


def verify_preproc(file: File, inputs: GateInputs, options: GateSpec, precision: str) -> Drift:
    """Run a file with preprocessing in one precision, and return the effect on its outputs.

    Raises:
        VerificationError: its outputs differ from those with Pillow.
    """
    drift = measure_drift(file, inputs.card, inputs.given, options, opener(file.path, precision, options.threads))
    console.say(f"in {precision}:")
    check_drift(drift, limits_of(file, precision))
    return drift


def check_zeros(file: File, images: Tensor, options: GateSpec) -> None:
    """Check that a file whose classifier is all zero gives zeros.

    Raises:
        VerificationError: it does not.
    """
    with opener(file.path, "fp32", options.threads)() as (session,):
        for name, found in run_session(session, images, file.names).items():
            if name == "logits" and bool(found.any()):
                raise VerificationError("the classifier is all zero, but the logits of the file are not")


def print_rows(rows: Sequence[GateRow], precision: str) -> None:
    """Print the table of one precision."""
    several, angles = len({row.output for row in rows}) > 1, any(row.least_cosine > -math.inf for row in rows)
    cells = []
    for row in rows:
        size = "" if row.size is None else f" of {row.size[0]}×{row.size[1]}"
        bound = "–" if math.isinf(row.bound) else f"{row.bound:.1e}"
        agreed = f"{row.agreed} of {row.compared}"
        line = [f"{row.batch}{size}", f"{row.error:.1e}", bound, agreed, str(row.excluded)]
        cells.append([*([row.output] if several else []), *line, *([f"{row.cosine:.6f}"] if angles else [])])
    columns = [*(["output"] if several else []), "batch", "max error", "bound", "argmax agreed", "rows excluded"]
    console.table(f"OpenVINO in {precision} against PyTorch in fp32", [*columns, *(["least cosine"] if angles else [])],
                  cells, left=(0,) if several else ())  # fmt: skip


def _other_rows(
    file: File, inputs: GateInputs, spec: GraphSpec, options: GateSpec, limits: Limits, sessions: Sessions
) -> list[GateRow]:  # fmt: skip
    """Return the rows of images of other sizes, where the file takes them."""
    rows: list[GateRow] = []
    card, count = inputs.card, spec.static_batch or 2
    for height, width in other_sizes(file.model, card.input) if spec.dynamic_size else ():
        other = dataclasses.replace(card, input=dataclasses.replace(card.input, height=height, width=width))
        images, _ = card_images(other, count, inputs.given, seed=options.seed)
        found, _ = verify_values(file.path, file.model, images, batches=(count,), names=file.names, limits=limits,
                                 sessions=sessions, temperature=card.temperature)  # fmt: skip
        rows += [dataclasses.replace(row, size=(height, width)) for row in found]
    if file.sizes is not None:
        check_odd_sizes(file, card.input, spec, options, sessions)
    return rows
