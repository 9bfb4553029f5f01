"""Verifies a written ONNX file against torch: structure, values, and of reduced precision the images of ``--data``."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from vtk import console
from vtk.card import InputSpec
from vtk.data.decoding.decode import pixel_limit
from vtk.errors import UnavailableError, VerificationError
from vtk.runtime.fp8_gate import check_agreement
from vtk.runtime.photographs import Photographs
from vtk_export.gate.images import GateInputs, card_images, judged_images
from vtk_export.gate.judge import check_judgement, judge
from vtk_export.gate.limits import LIMITS, Limits, with_budget
from vtk_export.gate.neighbours import Dependence, black_image, check_dependence, measure, rounding
from vtk_export.gate.openvino_sessions import limits_in, opener, precisions
from vtk_export.gate.verify import (
    GateRow,
    Sessions,
    check_rows,
    open_sessions,
    print_rows,
    run_session,
    verify_structure,
    verify_values,
)
from vtk_export.gate.zero_head import FILLED, check_zero_head, fill_zero_head, say_zero_head
from vtk_export.graph.nonfinite import mark_rows
from vtk_export.graph.precision import ONNX_NAMES
from vtk_export.graph.rename import load_graph
from vtk_export.graph.sizes import odd_sizes, other_sizes, runs
from vtk_export.onnx.build import File
from vtk_export.onnx.spec import GateSpec, GraphSpec
from vtk_export.output_folder import restamp, save

Make = Callable[[nn.Module, Path], File]
"""Writes the file of a model into a folder."""


def write_verified(
    model: nn.Module, make: Make, inputs: GateInputs, spec: GraphSpec, options: GateSpec, folder: Path, *,
    show: bool, compare: bool = True,
) -> tuple[File, File | None]:  # fmt: skip
    """Write a model's file and pass it through the gate, or a copy of it if its logits are all zero.

    Args:
        model: timm's.
        make: writes the file of a model into a folder.
        inputs: images to verify with.
        spec: what the file is to be.
        options: how it is verified.
        folder: of the file.
        show: print the gate's table.
        compare: False if logits cannot verify a classifier of zeros: those of int8, or none.

    Returns:
        The file, and that of the copy, in the folder `FILLED`, None without one.

    Raises:
        VerificationError: the file is not what was asked for, or its values are not torch's.
        UnavailableError: nothing here can run it, and ``options.unverified`` is False.
    """
    filled = fill_zero_head(model, options.seed) if compare else None
    if filled is None:
        return gate(make(model, folder), inputs, spec, options, show=show), None
    say_zero_head()
    (folder / FILLED).mkdir()
    other = gate(make(filled, folder / FILLED), inputs, spec, options, show=show)
    own = make(model, folder)
    file = dataclasses.replace(other, path=own.path, model=own.model, nodes=own.nodes)
    if file.facts.verified:
        check_zero_head(file.path, other.path, inputs.images[: inputs.batches[0]], file.names, options.threads)
    else:
        restamp(file.path, inputs.card, file.facts)
    return file, other


def gate(file: File, inputs: GateInputs, spec: GraphSpec, options: GateSpec, *, show: bool) -> File:
    """Run the gate on ``file``, and return it with the results, or raise."""
    card, size = inputs.card, inputs.card.input
    number = ONNX_NAMES["fp32" if spec.keep_io_types else file.facts.precision]
    sides = ("height", "width") if spec.dynamic_size else size.size
    verify_structure(
        file.path, card, opset=spec.file_opset, static_batch=spec.static_batch,
        inputs={"pixel_values": (number, (size.in_chans, *sides))},
        outputs={name: (number, (width,)) for name, width in file.widths(card).items()}, ir_version=spec.ir_version,
        facts=file.facts,
    )  # fmt: skip
    kind = file.facts.kind
    limits = LIMITS[kind]
    console.stage(f"comparing the file with PyTorch at {len(inputs.batches)} batch sizes")
    try:
        rows, remarks = verify_values(
            file.path, file.model, inputs.images, batches=inputs.batches, threads=options.threads, names=file.names,
            limits=limits, temperature=card.temperature,
        )  # fmt: skip
        rows += _other_rows(file, inputs, spec, options, limits)
        rows += _openvino_rows(file, inputs, options)
    except UnavailableError as error:
        if not options.unverified:
            raise
        console.warn(f"not verified: {str(error).partition(', so')[0]}; marked as unverified")
        facts = dataclasses.replace(file.facts, verified=False)
        restamp(file.path, card, facts)
        return dataclasses.replace(file, facts=facts)
    if show or not all(row.passed for row in rows):
        print_rows(rows)
        for line in (f"verified with {inputs.what}", *remarks):
            console.say(line)
    check_rows(rows)
    file = _with_neighbours(dataclasses.replace(file, rows=tuple(rows)), inputs, spec, options, limits, show=show)
    if kind == "fp32" or file.names == ("features",):
        return file
    if inputs.given is None:
        console.say(f"accuracy not measured; give --data to measure top-1 agreement of this {kind} file on images")
        return file
    chosen = judged_images(inputs.given, file.facts, spec.max_drop)
    photographs = Photographs(chosen, options.images, max_pixels=pixel_limit(card))
    console.stage(f"measuring top-1 agreement on {len(photographs.paths)} images")
    judgement = judge(file.path, file.model, photographs, size, names=file.names, threads=options.threads,
                      temperature=card.temperature)  # fmt: skip
    console.say(judgement.describe())
    if file.facts.fp8:  # one image more or less is not passed over
        check_agreement(round(judgement.agreement * judgement.count), judgement.count, judgement.what, "--dtype fp16")
    check_judgement(judgement, with_budget(limits, spec.max_drop))
    return dataclasses.replace(file, judgement=judgement)


def _openvino_rows(file: File, inputs: GateInputs, options: GateSpec) -> list[GateRow]:
    """Return the rows of OpenVINO in the precisions that it has here, where they are asked for."""
    found: list[GateRow] = []
    for precision in precisions() if "openvino" in options.verify_with else ():
        console.stage(f"comparing the file in OpenVINO in {precision}")
        rows, _ = verify_values(
            file.path, file.model, inputs.images, batches=inputs.batches, names=file.names,
            limits=limits_in(file.facts.kind, precision), sessions=opener(file.path, precision, options.threads),
        )  # fmt: skip
        found += [dataclasses.replace(row, runtime=f"OpenVINO, {precision}") for row in rows]
    return found


def _with_neighbours(
    file: File, inputs: GateInputs, spec: GraphSpec, options: GateSpec, limits: Limits, *, show: bool
) -> File:  # fmt: skip
    """Return ``file`` with its batch dependence; nodes are added where a NaN image would not get a row of NaN."""
    card, dynamic = inputs.card, file.facts.int8 == "dynamic"
    found = _measure(file, inputs, spec, options)
    if found.unmarked:
        proto = load_graph(file.path, file.facts)
        for path in (file.path, file.path.with_name("model.onnx.data")):
            path.unlink(missing_ok=True)
        mark_rows(proto)
        nodes = len(proto.graph.node)
        file = dataclasses.replace(file, path=save(proto, card, file.path.parent, file.facts), nodes=nodes)
        found = _measure(file, inputs, spec, options)
    bound = rounding(limits, dynamic=dynamic)
    if show or not found.relative <= bound:
        console.say(found.describe(bound))
    check_dependence(found, bound, dynamic=dynamic)
    if not found.relative <= bound:
        facts = dataclasses.replace(file.facts, batch_dependence=found.relative)
        restamp(file.path, card, facts)
        file = dataclasses.replace(file, facts=facts)
    return dataclasses.replace(file, dependence=found)


def _measure(file: File, inputs: GateInputs, spec: GraphSpec, options: GateSpec) -> Dependence:
    with open_sessions(file.path, options.threads, optimize=(True,)) as (session,):
        return measure(
            lambda rows: run_session(session, rows, file.names), inputs.images, static_batch=spec.static_batch,
            black=black_image(inputs.card.input), names=file.names,
        )  # fmt: skip


def _other_rows(
    file: File, inputs: GateInputs, spec: GraphSpec, options: GateSpec, limits: Limits
) -> list[GateRow]:  # fmt: skip
    """Return the rows of images of other sizes, where the file takes them."""
    rows: list[GateRow] = []
    card, count = inputs.card, spec.static_batch or 2
    for height, width in other_sizes(file.model, card.input) if spec.dynamic_size else ():
        other = dataclasses.replace(card, input=dataclasses.replace(card.input, height=height, width=width))
        images, _ = card_images(other, count, inputs.given, seed=options.seed)
        found, _ = verify_values(file.path, file.model, images, batches=(count,), threads=options.threads,
                                 names=file.names, limits=limits, temperature=card.temperature)  # fmt: skip
        rows += [dataclasses.replace(row, size=(height, width)) for row in found]
    if file.sizes is not None:
        check_odd_sizes(file, card.input, spec, options)
    return rows


def check_odd_sizes(
    file: File, size: InputSpec, spec: GraphSpec, options: GateSpec, sessions: Sessions | None = None
) -> None:  # fmt: skip
    """Check that the file accepts the sizes that the model accepts, and no others.

    Args:
        file: of a dynamic size.
        size: of the model.
        spec: what the file is to be.
        options: how it is run.
        sessions: opens the file, by default in ONNX Runtime.

    Raises:
        VerificationError: it accepts a size that the model refuses, or refuses one that the model accepts.
    """
    assert file.sizes is not None
    with sessions() if sessions else open_sessions(file.path, options.threads, optimize=(True,)) as (session,):
        for height, width in odd_sizes(size, file.sizes):
            taken = runs(file.model, size, (height, width))
            try:
                run_session(session, torch.zeros(spec.static_batch or 1, size.in_chans, height, width), file.names)
            except VerificationError as error:
                if taken:
                    raise VerificationError(f"{height}×{width} pixels, which the model accepts: {error}") from error
                continue
            if not taken:
                raise VerificationError(
                    f"the file accepts {height}×{width} pixels, which the model refuses; leave out --dynamic-size"
                )
