"""The drop of a metric that a change is expected to cause, from the full pack's own probabilities.

Where two models disagree on a few per cent of a few hundred images, the measured drop is mostly the luck of those
images' labels: of 500 images its standard error is about 0.8 points. So an image counts p of the class that a model
says, in place of whether its label is that class; p are the full pack's probabilities, calibrated by a temperature (Guo
et al., 2017) on the labels. On packs of ViT-S the expected drops of different halves were within 0.2 points of each
other, and within 0.4 of the drop measured on all images.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vtk.packs.compression.answers import Answers
from vtk.packs.compression.drop import DropMetric, mean_precision

_COARSE = torch.logspace(-1, 1, 21, dtype=torch.float64)
_FINE = torch.logspace(-0.1, 0.1, 21, dtype=torch.float64)
_PRIOR = 2.0  # nats at a temperature of e: few images do not decide alone


def probabilities(answers: Answers) -> Tensor:
    """Return the calibrated probabilities of a model, (n, classes) fp64."""
    logits = answers.logits.double()
    if answers.multi_label:
        truth = answers.labels.double()

        def loss(t: Tensor) -> Tensor:
            return F.binary_cross_entropy_with_logits(logits / t, truth, reduction="sum")
    else:

        def loss(t: Tensor) -> Tensor:
            return F.cross_entropy(logits / t, answers.labels, reduction="sum")

    best = torch.ones((), dtype=torch.float64)
    for grid in (_COARSE, _FINE):
        tried = best * grid
        best = tried[int(torch.stack([loss(t) + _PRIOR * t.log() ** 2 for t in tried]).argmin())]
    return (logits / best).sigmoid() if answers.multi_label else (logits / best).softmax(dim=1)


def expected_value(answers: Answers, truth: Tensor, metric: DropMetric) -> float:
    """Return the expectation of a metric of a model's answers.

    Args:
        answers: of the model.
        truth: (n, classes), the probability of each class or label.
        metric: top1, balanced_accuracy or mAP.
    """
    if metric == "mAP":
        truth = truth * answers.labels.any(dim=0)  # of the other labels nothing is asked
        one = torch.ones(1, len(truth), dtype=torch.float64)
        return float(mean_precision(answers.logits.numpy(), truth.numpy(), one.numpy())[0])
    said = F.one_hot(answers.decisions(), truth.shape[1]) * truth
    if metric == "top1":
        return float(said.sum(dim=1).mean())
    there = answers.labels.unique()  # of the other classes nothing is asked
    return float((said.sum(dim=0) / truth.sum(dim=0).clamp_min(1e-12))[there].mean())
