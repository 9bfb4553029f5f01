"""``--with-preproc``: prepends the preprocessing nodes to a verified file, and verifies the result against Pillow."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vtk import console
from vtk.card import Card
from vtk.errors import DataError, VerificationError
from vtk.runtime.backends.base import Backend
from vtk.runtime.data_option import DataImages
from vtk.runtime.photographs import Photographs
from vtk_export.gate.drift import COUNT, DRAWN, Drift, compare_outputs, drawn_images
from vtk_export.gate.images import GateInputs
from vtk_export.gate.limits import LEAST_COSINE, LIMITS, Limits
from vtk_export.gate.openvino_sessions import limits_in, opener, precisions
from vtk_export.gate.structure import verify_structure
from vtk_export.gate.verify import Sessions, open_sessions, reference_outputs
from vtk_export.graph.precision import ONNX_NAMES
from vtk_export.graph.preproc import RAW_TYPES, prepend
from vtk_export.graph.rename import load_graph
from vtk_export.onnx.build import File
from vtk_export.onnx.spec import GateSpec, GraphSpec
from vtk_export.output_folder import save


def add_preproc(file: File, card: Card, folder: Path, names: Mapping[str, str]) -> File:
    """Return ``file`` with the preprocessing in its graph and these names, written again into ``folder``."""
    proto = load_graph(file.path, file.facts)
    file.path.unlink()
    (folder / "model.onnx.data").unlink(missing_ok=True)
    prepend(proto, card.input)
    facts = dataclasses.replace(file.facts, preprocessing=True, names=dict(names))
    nodes = len(proto.graph.node)
    return dataclasses.replace(file, path=save(proto, card, folder, facts), facts=facts, nodes=nodes)


def gate_preproc(file: File, inputs: GateInputs, spec: GraphSpec, options: GateSpec) -> Drift | None:
    """Verify a file with preprocessing in its graph, and return the effect on its outputs.

    Returns None for a file that cannot run here and was kept by ``--unverified``.

    Raises:
        VerificationError: the file is not as requested, or its outputs differ from those with Pillow.
    """
    card, number = inputs.card, ONNX_NAMES["fp32" if spec.keep_io_types else file.facts.precision]
    verify_structure(
        file.path, card, opset=spec.file_opset, static_batch=spec.static_batch, ir_version=spec.ir_version,
        inputs={"images": (RAW_TYPES[card.input.value_type], ("height", "width", 3))},
        outputs={name: (number, (width,)) for name, width in file.widths(card).items()}, facts=file.facts,
    )  # fmt: skip
    if not file.facts.verified:
        return None
    drift = measure_drift(file, card, inputs.given, options)
    check_drift(drift, LIMITS[file.facts.kind])
    for precision in precisions() if "openvino" in options.verify_with else ():
        console.say(f"in OpenVINO in {precision}:")
        sessions = opener(file.path, precision, options.threads)
        check_drift(measure_drift(file, card, inputs.given, options, sessions), limits_in(file.facts.kind, precision))
    return drift


def measure_drift(
    file: File, card: Card, given: DataImages | None, options: GateSpec, sessions: Sessions | None = None
) -> Drift:
    """Run the file on decoded images, and PyTorch on the same images preprocessed as in evaluation.

    Args:
        file: with the preprocessing.
        card: of it.
        given: images of ``--data``, None for generated ones.
        options: how it is run.
        sessions: opens the file, by default in ONNX Runtime.

    Raises:
        VerificationError: the file does not run.
        DataError: no image of ``--data`` can be read.
    """
    from vtk.data.decoding.images import unreadable
    from vtk.data.decoding.memory_images import take_image
    from vtk.data.decoding.rules import Decoding
    from vtk.data.loading.eval_pipeline import eval_transform

    transform, name = eval_transform(card.input), file.names[0]
    expected, got = [], []
    with sessions() if sessions else open_sessions(file.path, options.threads, optimize=(True,)) as (session,):
        for path, image in _images(card, given, options.seed):
            try:
                inputs = transform(take_image(image, 3, Decoding.of(card.input)))[None]
            except DataError as fault:
                console.warn(f"skipped: {unreadable(path, fault.__cause__ or fault)}")
                continue
            expected.append(reference_outputs(file.model, inputs, file.names, card.temperature)[name])
            got.append(_run(session, image, name))
    if not got:
        raise DataError(f"`--data` {given.judging.what if given else DRAWN}: no image could be read; give others")
    what = given.judging.what if given else DRAWN
    return compare_outputs(torch.cat(expected), torch.cat(got), what, classes=name != "features")


def check_drift(drift: Drift, limits: Limits) -> None:
    """Print the effect of the preprocessing, and check it against the bound.

    Raises:
        VerificationError: the outputs differ from those with Pillow.
    """
    agreed = "" if math.isnan(drift.agreement) else f", the same class in {console.percent(drift.agreement, 1)}"
    console.say(
        f"preprocessing in the graph against Pillow's, on {drift.count} {drift.what}: largest difference "
        f"{drift.error:.1e} ({console.percent(drift.relative, 2)} of the largest output), least cosine "
        f"{drift.cosine_min:.5f}{agreed}"
    )
    least = min(LEAST_COSINE, limits.cosine or 1.0)
    if not drift.cosine_min >= least:
        raise VerificationError(
            f"with the preprocessing in the graph the outputs have a cosine of {drift.cosine_min:.5f} with Pillow's, "
            f"at least {least:g} is required; leave out --with-preproc"
        )


def _run(session: Backend, image: np.ndarray, name: str) -> Tensor:
    pixels = torch.from_numpy(np.array(image))[None]
    batch = pixels.expand(session.batch or 1, -1, -1, -1)
    try:
        return session.run({"images": batch})[name][:1].float().cpu()
    except Exception as error:  # onnxruntime has no common base class for its errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise VerificationError(
            f"an image of {image.shape[0]}×{image.shape[1]} pixels does not run: {reason}"
        ) from error


def _images(card: Card, given: DataImages | None, seed: int) -> Iterator[tuple[Path, np.ndarray]]:
    """Yield names and raw images, (height, width, 3) of the type that the graph takes."""
    from vtk.data.decoding.decode import pixel_limit, read_raw
    from vtk.data.decoding.raw_images import spread

    spec = card.input
    if given is None:
        yield from ((Path("drawn"), spread(image, spec.value_range, spec.value_type))
                    for image in drawn_images(spec, seed))  # fmt: skip
        return
    for path in Photographs(given.judging, COUNT).paths:
        try:
            yield path, read_raw(path, spec, pixel_limit(card))
        except (DataError, OSError) as error:
            console.warn(f"skipped: {error}")
