"""``--threshold auto``: appends the output ``unknown`` to a verified file, and verifies it by the file's own scores."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from vtk import console
from vtk.card import Card
from vtk.data.decoding.raw_images import spread
from vtk.errors import VerificationError
from vtk.runtime.backends.base import Backend
from vtk_export.gate.drift import drawn_images
from vtk_export.gate.images import GateInputs
from vtk_export.gate.verify import Sessions, open_sessions
from vtk_export.graph.rename import load_graph
from vtk_export.graph.unknown import UNKNOWN, append_unknown
from vtk_export.onnx.build import File
from vtk_export.onnx.spec import GateSpec
from vtk_export.output_folder import save

_NEAR, _COARSE = 1e-5, 1e-2  # of a threshold: scores that fp32 or a half type may put on other sides of it


def add_unknown(file: File, card: Card, folder: Path, names: Mapping[str, str]) -> File:
    """Return ``file`` with the output ``unknown`` and these names, written again into ``folder``."""
    proto = load_graph(file.path, file.facts)
    file.path.unlink()
    (folder / "model.onnx.data").unlink(missing_ok=True)
    append_unknown(proto, card)
    facts = dataclasses.replace(file.facts, names=dict(names))
    nodes = len(proto.graph.node)
    path = save(proto, card, folder, facts)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise VerificationError(f"onnx.checker refuses the file: {str(error).strip().splitlines()[0]}") from error
    return dataclasses.replace(file, path=path, facts=facts, nodes=nodes, names=(*file.names, UNKNOWN))


def gate_unknown(
    file: File, inputs: GateInputs, options: GateSpec, sessions: Sessions | None = None, *, exact: bool = True
) -> None:
    """Compare ``unknown`` with what the file's own logits, which were verified, say; an image of NaN is unknown.

    Args:
        file: with the output.
        inputs: images, and the card with the threshold.
        options: how it is run.
        sessions: opens the file, by default in ONNX Runtime.
        exact: the file's logits are computed in fp32 from their last product on.

    Raises:
        VerificationError: an image is unknown that should be answered, or the reverse.
    """
    if not file.facts.verified:
        return
    card, unknown, compared = inputs.card, 0, 0
    assert card.threshold is not None
    with sessions() if sessions else open_sessions(file.path, options.threads, optimize=(True,)) as (session, *_):
        for batch in _batches(session, file, inputs, options.seed):
            found = session.run(batch)
            logits = found["logits"].double().cpu()
            score = (logits / card.temperature).softmax(1).amax(1)
            # where logits come back as logarithms of fp16 probabilities, or are fp16 themselves
            near = _NEAR if exact and found["logits"].dtype == torch.float32 else _COARSE
            clear = (score - card.threshold.score).abs() > near
            said = found[UNKNOWN].cpu()
            if said.dtype != torch.bool or said.shape != score.shape:
                raise VerificationError(
                    f"`{UNKNOWN}` is {said.dtype} {tuple(said.shape)}, expected bool ({len(score)},)"
                )
            if bool(((score < card.threshold.score) != said)[clear].any()):
                raise VerificationError(
                    f"`{UNKNOWN}` is not what the file's own scores say; nothing was kept, please report this"
                )
            unknown, compared = unknown + int(said[clear].sum()), compared + int(clear.sum())
        if not file.facts.preprocessing:
            lost = torch.full_like(inputs.images[: session.batch or 1], torch.nan)
            if not bool(session.run({"pixel_values": lost})[UNKNOWN].all()):
                raise VerificationError(
                    f"`{UNKNOWN}` of an image of NaN is false; nothing was kept, please report this"
                )
    console.say(f"`{UNKNOWN}` as the scores say, of {compared} images: {unknown} unknown")
    if unknown in (0, compared):
        side = "answered" if unknown == 0 else "unknown"
        console.warn(
            f"all {compared} images are {side}, so the other answer was not tried; give --data FOLDER with images of "
            "the task, easy and hard ones"
        )


def _batches(session: Backend, file: File, inputs: GateInputs, seed: int) -> list[dict[str, Tensor]]:
    size = session.batch
    if not file.facts.preprocessing:
        parts = inputs.images.split(size or len(inputs.images))
        return [{"pixel_values": part} for part in parts if size in (None, len(part))]
    spec = inputs.card.input
    drawn = (spread(image, spec.value_range, spec.value_type) for image in drawn_images(spec, seed))
    images = [torch.from_numpy(np.array(image))[None] for image in drawn]
    return [{"images": image.expand(size or 1, -1, -1, -1)} for image in images]
