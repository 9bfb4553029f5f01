"""Holds a written file against torch: structure, values, and of reduced precision the images of ``--data``."""

import dataclasses
from collections.abc import Sequence

import onnx
import torch
from torch import Tensor

from vtk import console
from vtk.card import Card
from vtk.data.decoding.decode import pixel_limit
from vtk.errors import UnavailableError, VerificationError
from vtk.runtime.data_option import DataImages, judging_images
from vtk.runtime.fp8_gate import check_agreement
from vtk.runtime.photographs import Photographs
from vtk_export.gate.images import gate_images
from vtk_export.gate.judge import check_judgement, judge
from vtk_export.gate.limits import LIMITS, Limits
from vtk_export.gate.neighbours import Dependence, black_image, check_dependence, measure, rounding
from vtk_export.gate.verify import (
    GateRow,
    check_rows,
    open_sessions,
    print_rows,
    run_session,
    verify_structure,
    verify_values,
)
from vtk_export.graph.build import File
from vtk_export.graph.nonfinite import mark_rows
from vtk_export.graph.precision import ONNX_NAMES
from vtk_export.graph.preproc import RAW_TYPES
from vtk_export.graph.raw import Drift, check_drift, measure_drift
from vtk_export.graph.sizes import odd_sizes, other_sizes, runs
from vtk_export.onnx.config import OnnxConfig
from vtk_export.place import restamp, save


def gate(
    file: File, card: Card, config: OnnxConfig, images: Tensor, what: str, batches: Sequence[int],
    given: DataImages | None, *, show: bool,
) -> File:  # fmt: skip
    """Return ``file`` with what the gate found, or raise; ``given`` are the images of ``--data``."""
    number = ONNX_NAMES["fp32" if config.keep_io_types else file.facts.precision]
    spec = card.input
    sides = ("height", "width") if config.dynamic_size else spec.size
    verify_structure(
        file.path, card, opset=config.file_opset, static_batch=config.static_batch,
        inputs={"pixel_values": (number, (spec.in_chans, *sides))},
        outputs={name: (number, (width,)) for name, width in file.widths(card).items()}, ir_version=config.ir,
    )  # fmt: skip
    kind = file.facts.kind
    limits = LIMITS[kind]
    console.stage(f"comparing the file with torch at {len(batches)} batch sizes")
    try:
        rows, remarks = verify_values(file.path, file.model, images, batches=batches, threads=config.threads,
                                      names=file.names, limits=limits)  # fmt: skip
        rows += _other_rows(file, card, config, limits, given)
    except UnavailableError as error:
        if not config.unverified:
            raise
        console.warn(f"not verified: {str(error).partition(', so')[0]}; the file says so")
        facts = dataclasses.replace(file.facts, verified=False)
        restamp(file.path, card, facts)
        return dataclasses.replace(file, facts=facts)
    if show or not all(row.passed for row in rows):
        print_rows(rows)
        for line in (f"verified with {what}", *remarks):
            console.say(line)
    check_rows(rows)
    file = _with_neighbours(dataclasses.replace(file, rows=tuple(rows)), card, config, images, limits, show=show)
    if kind == "fp32" or file.names == ("features",):
        return file
    if given is None:
        console.say(f"what {kind} costs in accuracy is not known: give --data for agreement and top-1 on real images")
        return file
    limit = pixel_limit(card)
    # not the images that it was calibrated on
    chosen = given.calibration[1] if file.facts.calibrated else given.judging
    photographs = Photographs(chosen, config.images, max_pixels=limit)
    console.stage(f"judging the file on {len(photographs.paths)} images")
    judgement = judge(file.path, file.model, photographs, spec, names=file.names, threads=config.threads)
    console.say(judgement.describe())
    if file.facts.fp8:  # one image more or less is not passed over
        check_agreement(round(judgement.agreement * judgement.count), judgement.count, judgement.what, "--dtype fp16")
    check_judgement(judgement, limits)
    return dataclasses.replace(file, judgement=judgement)


def _with_neighbours(
    file: File, card: Card, config: OnnxConfig, images: Tensor, limits: Limits, *, show: bool
) -> File:  # fmt: skip
    """Return ``file`` with what the other images of a call do to an image's outputs; a NaN image gets a row of NaN."""
    dynamic = file.facts.int8 == "dynamic"
    found = _measure(file, card, config, images)
    if found.unmarked:
        proto = onnx.load(file.path)
        for path in (file.path, file.path.with_name("model.onnx.data")):
            path.unlink(missing_ok=True)
        mark_rows(proto)
        nodes = len(proto.graph.node)
        file = dataclasses.replace(file, path=save(proto, card, file.path.parent, file.facts), nodes=nodes)
        found = _measure(file, card, config, images)
    bound = rounding(limits, dynamic=dynamic)
    if show or not found.relative <= bound:
        console.say(found.describe(bound))
    check_dependence(found, bound, dynamic=dynamic)
    if not found.relative <= bound:
        facts = dataclasses.replace(file.facts, batch_dependence=found.relative)
        restamp(file.path, card, facts)
        file = dataclasses.replace(file, facts=facts)
    return dataclasses.replace(file, dependence=found)


def _measure(file: File, card: Card, config: OnnxConfig, images: Tensor) -> Dependence:
    with open_sessions(file.path, config.threads, optimize=(True,)) as (session,):
        return measure(lambda rows: run_session(session, rows, file.names), images, static_batch=config.static_batch,
                       black=black_image(card.input), names=file.names)  # fmt: skip


def _other_rows(file: File, card: Card, config: OnnxConfig, limits: Limits, given: DataImages | None) -> list[GateRow]:
    """Return the rows of images of other sizes, where the file takes them."""
    rows: list[GateRow] = []
    spec, limit = card.input, pixel_limit(card)
    for size in other_sizes(file.model, spec) if config.dynamic_size else ():
        count = config.static_batch or 2
        other = dataclasses.replace(spec, height=size[0], width=size[1])
        images, _ = gate_images(other, count, chosen=judging_images(given), seed=config.seed, max_pixels=limit)
        found, _ = verify_values(file.path, file.model, images, batches=(count,), threads=config.threads,
                                 names=file.names, limits=limits)  # fmt: skip
        rows += [dataclasses.replace(row, size=size) for row in found]
    if file.sizes is not None:
        _check_odd_sizes(file, card, config)
    return rows


def _check_odd_sizes(file: File, card: Card, config: OnnxConfig) -> None:
    """Make sure that the file answers where torch does, and nowhere else.

    Raises:
        VerificationError: it answers images of a size that torch refuses, or refuses some that torch answers.
    """
    assert file.sizes is not None
    spec = card.input
    with open_sessions(file.path, config.threads, optimize=(True,)) as (session,):
        for height, width in odd_sizes(spec, file.sizes):
            taken = runs(file.model, spec, (height, width))
            try:
                run_session(session, torch.zeros(config.static_batch or 1, spec.in_chans, height, width), file.names)
            except VerificationError as error:
                if taken:
                    raise VerificationError(f"{height}×{width}, which torch takes: {error}") from error
                continue
            if not taken:
                raise VerificationError(
                    f"the file answers images of {height}×{width} pixels, which torch refuses; leave out --dynamic-size"
                )


def gate_preproc(file: File, card: Card, config: OnnxConfig, given: DataImages | None) -> Drift | None:
    """Check a file whose preprocessing was put into its graph, and return what that changes in its outputs.

    A file that nothing here runs, kept by ``--unverified``, gives None.

    Raises:
        VerificationError: the file is not what was asked for, or its outputs are others than with Pillow.
    """
    number = ONNX_NAMES["fp32" if config.keep_io_types else file.facts.precision]
    verify_structure(
        file.path, card, opset=config.file_opset, static_batch=config.static_batch, ir_version=config.ir,
        inputs={"images": (RAW_TYPES[card.input.value_type], ("height", "width", 3))},
        outputs={name: (number, (width,)) for name, width in file.widths(card).items()},
    )  # fmt: skip
    if not file.facts.verified:
        return None
    drift = measure_drift(file, card, config, given)
    check_drift(drift, LIMITS[file.facts.kind])
    return drift
