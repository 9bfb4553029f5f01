"""Accuracies of features as they are: weighted k nearest neighbours, and a linear classifier on top.

Both say how well classes are apart in the features of a model that was trained without them (Wu et al. 2018; Caron et
al. 2021, section 4.1).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

KNN_TEMPERATURE = 0.07
"""Of the votes, as in Wu et al. 2018 and Caron et al. 2021."""
PENALTY = 1e-4
"""Of the linear classifier, on half its squared weights: only to have one best solution."""
_ROWS = 1024  # queries at a time: all products with the bank would not fit
_STEPS = 200


@torch.no_grad()
def knn_top1(
    bank: Tensor, bank_labels: Tensor, features: Tensor, labels: Tensor, *, k: int = 20,
    temperature: float = KNN_TEMPERATURE,
) -> float:  # fmt: skip
    """Return the share of ``features`` whose k nearest neighbours in ``bank``, by cosine, vote for their label.

    A neighbour at cosine s has exp(s / temperature) votes.

    Args:
        bank: (n, D).
        bank_labels: (n,) int64.
        features: (m, D).
        labels: (m,) int64.
        k: neighbours; all of the bank if it has fewer.
        temperature: of the votes.
    """
    bank, features = (F.normalize(part.float(), dim=1) for part in (bank, features))
    classes = int(torch.cat([bank_labels, labels]).max()) + 1
    right = 0
    for rows, targets in zip(features.split(_ROWS), labels.split(_ROWS), strict=True):
        cosines, nearest = (rows @ bank.T).topk(min(k, len(bank)), dim=1)
        votes = torch.zeros(len(rows), classes, device=rows.device)
        votes.scatter_add_(1, bank_labels[nearest], (cosines / temperature).exp())
        right += int((votes.argmax(1) == targets).sum())
    return right / len(features)


def fit_linear(features: Tensor, labels: Tensor, classes: int, penalty: float = PENALTY) -> tuple[Tensor, Tensor]:
    """Return weights (classes, D) and bias (classes,) of multinomial logistic regression.

    They minimise mean cross-entropy + penalty / 2 · Σ weights², by L-BFGS over all images from zero: no learning rate,
    no order of images.

    Args:
        features: (n, D).
        labels: (n,) int64.
        classes: number of classes.
        penalty: on the weights.
    """
    weights = torch.zeros(classes, features.shape[1], device=features.device, dtype=features.dtype, requires_grad=True)
    bias = torch.zeros(classes, device=features.device, dtype=features.dtype, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weights, bias], max_iter=_STEPS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        solver.zero_grad()
        with torch.enable_grad():
            value = F.cross_entropy(F.linear(features, weights, bias), labels) + penalty / 2 * weights.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach(), bias.detach()


def probe_top1(
    bank: Tensor, bank_labels: Tensor, features: Tensor, labels: Tensor, *, penalty: float = PENALTY
) -> float:
    """Return the accuracy on ``features`` of a linear classifier fitted to ``bank``; arguments as of `knn_top1`.

    Features are standardised by mean and deviation of the bank.
    """
    deviation, mean = torch.std_mean(bank.float(), dim=0, correction=0)
    scale = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    bank, features = ((part.float() - mean) / scale for part in (bank, features))
    classes = int(torch.cat([bank_labels, labels]).max()) + 1
    answers = F.linear(features, *fit_linear(bank, bank_labels, classes, penalty)).argmax(1)
    return float((answers == labels).double().mean())
