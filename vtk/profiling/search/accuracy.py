"""The accuracy gate of the search: each back-end and precision against the fp32 reference, by the bounds of exports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vtk.data.decoding.decode import pixel_limit
from vtk.errors import VerificationError
from vtk.profiling.compare import centred, compare, gives_probabilities
from vtk.profiling.reference import FILES
from vtk.profiling.search.variants import Variant
from vtk.runtime.backends.base import load_backend, predictor
from vtk.runtime.data_option import DataImages
from vtk.runtime.photographs import Photographs
from vtk.runtime.source import Source
from vtk_export.gate.judge import Judgement, check_judgement
from vtk_export.gate.limits import LIMITS

_BATCH = 16
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    """What a back-end and a precision cost in accuracy.

    Attributes:
        backend: as on the command line.
        precision: as of the setups.
        passed: within the bounds of an export of this precision, or not measured.
        reason: why it is left out.
        judgement: on the images of ``--data``; None without them.
    """

    backend: str
    precision: str
    passed: bool
    reason: str = ""
    judgement: Judgement | None = None


class Judge:
    """Holds the reference's answers to the images of ``--data``, computed once.

    Args:
        reference: whose answers are right: a model in torch, or a file.
        given: the images.
        count: at most so many.
        threads: of the CPU.
    """

    def __init__(self, reference: Source, given: DataImages, count: int, threads: int) -> None:
        self.reference, self.given, self.count, self.threads = reference, given, count, threads
        self._known: dict[tuple[object, ...], tuple[Tensor, list[int], Photographs]] = {}

    def judge(self, variant: Variant) -> Verdict:
        """Run a variant on the images, as a server would, and hold it against the limits of its precision."""
        assert variant.source is not None
        calibrated = variant.source.facts.calibrated
        chosen = self.given.calibration[1] if calibrated else self.given.judging
        photographs = Photographs(chosen, self.count, max_pixels=pixel_limit(self.reference.card))
        expected, places, photographs = self._expected(photographs)
        backend = load_backend(variant.backend, variant.source, dtype=variant.dtype, threads=self.threads)
        try:
            got = self._answers(predictor(backend), photographs)[0]
            probabilities = gives_probabilities(backend)
        finally:
            backend.close()
        labels = None if photographs.labels is None else [photographs.labels[i] for i in places]
        found = compare_answers(got, expected, labels, photographs.what)
        if variant.kind == "fp32":  # whose answers are the same numbers
            mine, theirs = got, expected
            if probabilities:
                mine, theirs = centred(got, half=False), centred(expected, half=False)
            if not (difference := compare(mine, theirs, "fp32")).ok:
                return Verdict(*variant.key, False, difference.reason, found)
        try:
            check_judgement(found, LIMITS[variant.kind])
        except VerificationError as error:
            return Verdict(*variant.key, False, str(error), found)
        return Verdict(*variant.key, True, "", found)

    def _expected(self, photographs: Photographs) -> tuple[Tensor, list[int], Photographs]:
        key = tuple(photographs.paths)
        if key not in self._known:
            if self.reference.kind in FILES:
                name = {"onnx": "ort-cpu"}.get(self.reference.kind, self.reference.kind)
                precision = self.reference.facts.precision
                backend = load_backend(name, self.reference, dtype=precision, threads=self.threads)
                predict = predictor(backend)
            else:
                model = self.reference.model()
                predict = torch.inference_mode()(model)
            self._known[key] = (*self._answers(predict, photographs), photographs)
        return self._known[key]

    def _answers(self, predict: Predict, photographs: Photographs) -> tuple[Tensor, list[int]]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            rows, places = [], []
            for images, indices in photographs.batches(self.reference.card.input, _BATCH):
                rows.append(predict(images).detach().float().cpu())
                places += indices
        finally:
            torch.set_num_threads(before)
        return torch.cat(rows), places


def compare_answers(got: Tensor, expected: Tensor, labels: Sequence[int] | None, what: str) -> Judgement:
    """Return how logits (n, classes) agree with the reference's, and with the labels where these are known."""
    ours, theirs = got.argmax(1), expected.argmax(1)
    cosine = F.cosine_similarity(got.double(), expected.double(), dim=1)
    truth = None if labels is None else torch.tensor(labels)
    top1, fp32 = (None, None) if truth is None else (_share(ours, truth), _share(theirs, truth))
    return Judgement(
        count=len(ours), agreement=_share(ours, theirs), cosine_mean=cosine.mean().item(),
        cosine_min=cosine.min().item(), top1=top1, top1_fp32=fp32, what=what,
    )  # fmt: skip


def _share(one: Tensor, other: Tensor) -> float:
    return (one == other).double().mean().item()
