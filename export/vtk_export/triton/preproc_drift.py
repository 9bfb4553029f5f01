"""Compares the server's own preprocessing code, and the logits of its images, with the toolkit's."""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vtk import console
from vtk.card import Card, InputSpec
from vtk.data.decoding.decode import pixel_limit
from vtk.errors import DataError, VerificationError
from vtk.runtime.data_option import data_images, judging_images
from vtk.runtime.data_parts import Split
from vtk.runtime.images import ImageSelection
from vtk.runtime.photographs import Photographs
from vtk_export.gate.drift import COUNT, DRAWN, Drift, compare_outputs, drawn_images
from vtk_export.gate.limits import LEAST_COSINE
from vtk_export.triton.served.vtk_images import Unreadable, decode, from_array, prepare

_STORED = ("PNG", "JPEG", "PNG", "JPEG", "PNG")
"""Formats of the drawn images."""


def measure_served(
    cards: Mapping[str, Card], model: Callable[[str], nn.Module], *, folders: Mapping[str, Path | None],
    split: Split | None, seed: int,
) -> Drift:  # fmt: skip
    """Compare the logits of both kinds of preprocessing, for every distinct input of the tasks.

    Args:
        cards: of the tasks.
        model: returns a task's own model.
        folders: images of each task; drawn ones where there are none.
        split: which part of them.
        seed: of drawn images.

    Raises:
        DataError: no image could be read.
        VerificationError: the logits are others.
    """
    worst: Drift | None = None
    firsts: dict[InputSpec, str] = {}
    for name, card in cards.items():
        firsts.setdefault(card.input, name)
    for spec, name in firsts.items():
        given = data_images(cards[name], folders.get(name), split)
        found = _measure(spec, model(name), judging_images(given), seed, pixel_limit(cards[name]))
        if worst is None or not found.cosine_min >= worst.cosine_min:
            worst = found
    assert worst is not None
    same = "equal" if not worst.error else f"different by up to {worst.error:.1e}, least cosine {worst.cosine_min:.6f}"
    console.say(f"preprocessing in the server against this toolkit's, on {worst.count} {worst.what}: logits {same}")
    if not worst.cosine_min >= LEAST_COSINE:
        raise VerificationError(
            f"with the server's preprocessing the logits have a cosine of {worst.cosine_min:.5f} with this toolkit's, "
            f"at least {LEAST_COSINE:g} is required; nothing was kept, please report this"
        )
    return worst


def _measure(spec: InputSpec, model: nn.Module, chosen: ImageSelection | None, seed: int, limit: int) -> Drift:
    from vtk.data.decoding.memory_images import take_image
    from vtk.data.decoding.rules import Decoding
    from vtk.data.loading.eval_pipeline import eval_transform, read_input

    transform, plain, decoding = eval_transform(spec), json.loads(json.dumps(spec.to_dict())), Decoding.of(spec)
    mine, theirs = [], []
    for raw, path in _photographs(chosen) if chosen is not None else _drawn(spec, seed):
        try:
            if not path and spec.in_chans not in (1, 3):
                array = np.frombuffer(raw, np.uint8).reshape(*spec.size, spec.in_chans)
                served = torch.from_numpy(prepare(from_array(array, plain), plain))
                mine.append(transform(take_image(array, spec.in_chans, decoding)))
                theirs.append(served)
                continue
            own = read_input(path, transform, limit) if path else transform(Image.open(io.BytesIO(raw)).convert("RGB"))
            theirs.append(torch.from_numpy(prepare(decode(raw, plain), plain)))
            mine.append(own)
        except DataError as error:
            console.warn(f"skipped: {error}")
        except Unreadable as error:
            console.warn(f"the server will refuse {path}: {error}")
    if not mine:
        raise DataError(f"`--data`: no image of {chosen.what if chosen else 'those drawn'} could be read; give others")
    what = chosen.what if chosen else DRAWN
    return compare_outputs(_logits(model, torch.stack(mine)), _logits(model, torch.stack(theirs)), what)


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model.eval()(images)
    return logits


def _photographs(chosen: ImageSelection) -> Iterator[tuple[bytes, Path | None]]:
    for path in Photographs(chosen, COUNT).paths:
        try:
            yield path.read_bytes(), path
        except OSError as error:
            console.warn(f"skipped: {path}: {error.strerror or error}")


def _drawn(spec: InputSpec, seed: int) -> Iterator[tuple[bytes, Path | None]]:
    if spec.in_chans not in (1, 3):  # no format that is written here holds so many
        rng = np.random.default_rng(seed)
        for _ in range(2):
            yield rng.integers(0, 256, (*spec.size, spec.in_chans), dtype=np.uint8).tobytes(), None
        return
    for image, kind in zip(drawn_images(spec, seed), _STORED, strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, kind)
        yield file.getvalue(), None
