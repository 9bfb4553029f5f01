"""k-NN against a double loop, and the linear probe against scikit-learn's logistic regression."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from vtk.evaluation.frozen_features import fit_linear, knn_top1, probe_top1


def blobs(n, seed, spread=1.0, classes=4, dim=6):
    generator = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(n) % classes
    return centers[labels] + spread * torch.randn(n, dim, generator=generator), labels


def knn_by_hand(bank, bank_labels, features, labels, k, temperature):
    right = 0
    for x, y in zip(features.double().tolist(), labels.tolist(), strict=True):
        cosines = []
        for row, label in zip(bank.double().tolist(), bank_labels.tolist(), strict=True):
            cosines.append((float(np.dot(x, row)) / math.hypot(*x) / math.hypot(*row), label))
        votes = {}
        for cosine, label in sorted(cosines, reverse=True)[:k]:
            votes[label] = votes.get(label, 0.0) + math.exp(cosine / temperature)
        right += max(votes, key=votes.get) == y
    return right / len(labels)


@pytest.mark.parametrize(("k", "temperature"), [(5, 0.07), (1, 0.07), (500, 1.0)], ids=["5", "1", "all"])
def test_knn_is_the_vote_of_the_nearest(k, temperature):
    bank, bank_labels, features, labels = *blobs(60, 0, 2.5), *blobs(50, 1, 2.5)
    found = knn_top1(bank, bank_labels, features, labels, k=k, temperature=temperature)
    assert found == knn_by_hand(bank, bank_labels, features, labels, k, temperature)
    assert 0.3 < found < 0.95  # neither none nor all


def test_many_queries_are_taken_in_parts():
    bank, bank_labels, features, labels = *blobs(40, 0), *blobs(2100, 1)
    parts = [knn_top1(bank, bank_labels, features[i : i + 700], labels[i : i + 700]) for i in (0, 700, 1400)]
    assert knn_top1(bank, bank_labels, features, labels) == pytest.approx(sum(parts) / 3)


def test_the_linear_probe_is_scikit_learns_solution():
    features, labels = blobs(90, 2, 3.0)
    penalty = 1e-2
    weights, bias = fit_linear(features.double(), labels, 4, penalty)
    theirs = LogisticRegression(C=1 / (penalty * len(labels)), tol=1e-10, max_iter=10_000)
    theirs.fit(features.double(), labels)
    assert np.allclose(weights, theirs.coef_, atol=1e-4)
    shift = bias.numpy() - theirs.intercept_  # a constant is free
    assert np.allclose(shift, shift.mean(), atol=1e-4)


def test_the_probe_standardises_by_the_bank_and_ignores_what_never_changes():
    bank, bank_labels, features, labels = *blobs(80, 3, 3.0), *blobs(60, 4, 3.0)
    plain = probe_top1(bank, bank_labels, features, labels)
    far = torch.tensor([1.0, 1e3, 1e-3, 1.0, 50.0, 1.0])
    moved = [torch.cat([part * far + 7, torch.full((len(part), 1), 3.0)], 1) for part in (bank, features)]
    assert probe_top1(moved[0], bank_labels, moved[1], labels) == pytest.approx(plain, abs=1 / 60)
    assert 0.4 < plain < 1
    assert probe_top1(bank, bank_labels, features, torch.full_like(labels, 9)) == 0  # a class of which none was seen
