"""Measures top-1 agreement with PyTorch, and accuracy, of files of reduced precision on real images."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from vtk import console
from vtk.card import InputSpec
from vtk.errors import VerificationError
from vtk.runtime.backends.base import predictor
from vtk.runtime.photographs import Photographs
from vtk_export.gate.limits import Limits
from vtk_export.gate.verify import Sessions, open_sessions, reference_outputs

_BATCH = 16


@dataclass(frozen=True)
class Judgement:
    """A file, compared with PyTorch in fp32 on the images of ``--data``.

    Attributes:
        count: images.
        agreement: share with torch's most likely class.
        cosine_mean: of the outputs' cosines with torch's, one per image.
        cosine_min: the smallest.
        top1: accuracy of the file, None where the folders are not named after the classes.
        top1_fp32: of torch in fp32.
        what: the images are.
    """

    count: int
    agreement: float
    cosine_mean: float
    cosine_min: float
    top1: float | None = None
    top1_fp32: float | None = None
    what: str = "images"

    def describe(self) -> str:
        """Return one line for people."""
        text = (
            f"on {self.count} {self.what}: top-1 agreement with PyTorch {console.percent(self.agreement, 2)}, cosine "
            f"mean {self.cosine_mean:.6f}, min {self.cosine_min:.6f}"
        )
        if self.top1 is None or self.top1_fp32 is None:
            return text
        return f"{text}; top-1 {console.percent(self.top1, 2)}, PyTorch fp32 {console.percent(self.top1_fp32, 2)}"


def judge(
    path: Path,
    model: nn.Module,
    photographs: Photographs,
    spec: InputSpec,
    *,
    names: Sequence[str],
    threads: int | None,
    temperature: float = 1.0,
    sessions: Sessions | None = None,
) -> Judgement:
    """Run the file, as a server would, and PyTorch on all images.

    Args:
        path: the ONNX file; it gives logits or probabilities.
        model: what it was exported from.
        photographs: images, perhaps with classes.
        spec: preprocessing.
        names: of the file's outputs.
        threads: CPU threads.
        temperature: of the card.
        sessions: opens the file, by default in ONNX Runtime.
    """
    cosines, mine, theirs, places = [], [], [], []
    with sessions() if sessions else open_sessions(path, threads, optimize=(True,)) as (session,):
        predict = predictor(session)
        for images, indices in photographs.batches(spec, session.batch or _BATCH):
            got = predict(images).float().cpu()
            expected = reference_outputs(model, images, names, temperature)[names[0]]
            mine.append(got.argmax(1))
            theirs.append(expected.argmax(1))
            shown = (got / temperature).softmax(1) if names[0] == "probabilities" else got
            cosines.append(F.cosine_similarity(shown.double(), expected.double(), dim=1))
            places += indices
    cosine, ours, torchs = torch.cat(cosines), torch.cat(mine), torch.cat(theirs)
    what = f"{photographs.what}, each alone" if getattr(session, "apart", False) else photographs.what
    result = Judgement(
        count=len(ours),
        agreement=(ours == torchs).double().mean().item(),
        cosine_mean=cosine.mean().item(),
        cosine_min=cosine.min().item(),
        what=what,
    )
    if photographs.labels is None:
        return result
    labels = torch.tensor([photographs.labels[i] for i in places])
    tops = [(rows == labels).double().mean().item() for rows in (ours, torchs)]
    return dataclasses.replace(result, top1=tops[0], top1_fp32=tops[1])


def check_judgement(result: Judgement, limits: Limits) -> None:
    """Check a judgement against the limits of the file's precision.

    Raises:
        VerificationError: says which number is beyond its bound.
    """
    where = f"on {result.count} {result.what}"
    floor = limits.cosine if limits.mean is None else limits.mean
    if floor is not None and not result.cosine_mean >= floor:
        raise VerificationError(f"{where} the mean cosine with PyTorch is {result.cosine_mean:.6f}, at least "
                                f"{floor:g} is required")  # fmt: skip
    if limits.top1 is not None and result.top1 is not None and result.top1_fp32 is not None:
        # where one image is more than the bound, one image may differ
        if result.top1_fp32 - result.top1 > max(limits.top1, 1 / result.count) + 1e-9:
            was, now = console.percent(result.top1_fp32, 2), console.percent(result.top1, 2)
            raise VerificationError(
                f"{where} top-1 drops from {was} to {now}, by more than {console.percent(limits.top1)}"
            )
        return
    # one image that differs says nothing about a share
    least = None if limits.agreement is None else min(limits.agreement, 1 - 1 / result.count)
    if least is not None and not result.agreement >= least - 1e-9:
        raise VerificationError(
            f"{where} top-1 agreement with PyTorch is {console.percent(result.agreement, 2)}, at least "
            f"{console.percent(least, 2)} is required"
        )
    assert not math.isnan(result.agreement)
