"""``--with-preproc``: the nodes are put before a verified file, and what they change in its outputs is measured."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn import functional as F

from vtk import console
from vtk.card import Card
from vtk.errors import DataError, VerificationError
from vtk.runtime.backends.base import Backend
from vtk.runtime.data_option import DataImages
from vtk.runtime.photographs import Photographs
from vtk_export.gate.limits import LEAST_COSINE, Limits
from vtk_export.gate.verify import open_sessions, reference_outputs
from vtk_export.graph.build import File
from vtk_export.graph.preproc import prepend
from vtk_export.onnx.config import OnnxConfig
from vtk_export.place import save

_COUNT = 16
# sides of drawn images, in shares of the model's: enlarged, reduced, wide, tall, and as they are
_SHAPES = ((0.7, 0.9), (1.5, 2.2), (1.0, 2.5), (2.1, 1.3), (1.0, 1.0))


@dataclass(frozen=True)
class Drift:
    """Outputs of a file with its own preprocessing against torch with Pillow's.

    Attributes:
        count: images, each of its own size where they have one.
        what: what they are.
        cosine_min: smallest cosine of an image's outputs.
        error: largest absolute difference.
        relative: the same as a fraction of the largest absolute output.
        agreement: share of images with the same most likely class; NaN of features.
    """

    count: int
    what: str
    cosine_min: float
    error: float
    relative: float
    agreement: float


def add_preproc(file: File, card: Card, folder: Path) -> File:
    """Return ``file`` with the preprocessing in its graph, written again into ``folder``."""
    proto = onnx.load(file.path)
    file.path.unlink()
    (folder / "model.onnx.data").unlink(missing_ok=True)
    prepend(proto, card.input)
    facts = dataclasses.replace(file.facts, preprocessing=True)
    nodes = len(proto.graph.node)
    return dataclasses.replace(file, path=save(proto, card, folder, facts), facts=facts, nodes=nodes)


def measure_drift(file: File, card: Card, config: OnnxConfig, given: DataImages | None) -> Drift:
    """Run the file on decoded images and torch on what the evaluation makes of them.

    Raises:
        VerificationError: the file does not run.
        DataError: no image of ``--data`` can be read.
    """
    from vtk.data.decoding.images import unreadable
    from vtk.data.decoding.memory_images import take_image
    from vtk.data.decoding.rules import Decoding
    from vtk.data.loading.eval_transform import eval_transform

    transform = eval_transform(card.input)
    expected, got, count = [], [], 0
    with open_sessions(file.path, config.threads, optimize=(True,)) as (session,):
        for name, image in _images(card, config, given):
            try:
                inputs = transform(take_image(image, 3, Decoding.of(card.input)))[None]
            except DataError as fault:
                console.warn(f"skipped: {unreadable(name, fault.__cause__ or fault)}")
                continue
            expected.append(reference_outputs(file.model, inputs, file.names)[file.names[0]])
            got.append(_run(session, image, file.names[0]))
            count += 1
    if not count:
        raise DataError(f"`--data` {config.data}: no image could be read; give others")
    want, have = torch.cat(expected).double(), torch.cat(got).double()
    error = (want - have).abs().max().item()
    same = want.argmax(1) == have.argmax(1)
    return Drift(
        count=count,
        what=given.judging.what if given else "drawn images of several sizes",
        cosine_min=F.cosine_similarity(want, have, dim=1).min().item(),
        error=error,
        relative=error / max(want.abs().max().item(), 1e-30),
        agreement=math.nan if file.names[0] == "features" else same.double().mean().item(),
    )


def check_drift(drift: Drift, limits: Limits) -> None:
    """Say what the preprocessing changes, and hold it against the bound.

    Raises:
        VerificationError: the outputs are others than with Pillow.
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
            f"at least {least:g} is allowed; leave out --with-preproc"
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


def _images(card: Card, config: OnnxConfig, given: DataImages | None) -> Iterator[tuple[Path, np.ndarray]]:
    """Yield names and raw images, (height, width, 3) of the type that the graph takes."""
    from vtk.data.decoding.decode import pixel_limit, read_raw
    from vtk.data.decoding.raw_images import spread
    from vtk.data.random_images import smooth_bytes

    spec = card.input
    if given is not None:
        for path in Photographs(given.judging, _COUNT).paths:
            try:
                yield path, read_raw(path, spec, pixel_limit(card))
            except (DataError, OSError) as error:
                console.warn(f"skipped: {error}")
        return
    rng = np.random.default_rng(config.seed)
    for down, across in _SHAPES:
        height, width = max(round(down * spec.height), 1), max(round(across * spec.width), 1)
        drawn = smooth_bytes(rng, height, width)
        yield Path("drawn"), spread(drawn, spec.value_range, spec.value_type)
