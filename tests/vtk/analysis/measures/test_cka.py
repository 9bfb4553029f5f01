"""Mini-batch CKA against the estimate written out with sums over images, and features whose likeness is known."""

import itertools
import math

import pytest
import torch

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import feature_similarity
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.measures.cka import centred_gram, hsic
from vtk.analysis.probes.residual_units import residual_units, watch_units
from vtk.errors import UsageError


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def direct(x, y):
    """Song et al. 2012: [tr(KL) + 1ᵀK1·1ᵀL1/((n−1)(n−2)) − 2/(n−2)·1ᵀKL1] / (n(n−3)), diagonals of K and L 0."""
    n = len(x)
    gram, other = ((f.flatten(1) @ f.flatten(1).T) * (1 - torch.eye(n)) for f in (x, y))
    ones = torch.ones(n, dtype=torch.float64)
    value = (gram @ other).trace() + ones @ gram @ ones * (ones @ other @ ones) / ((n - 1) * (n - 2))
    return float(value - 2 / (n - 2) * (ones @ gram @ other @ ones)) / (n * (n - 3))


def by_tuples(x, y):
    """The same as a mean over all four different images: its expectation is HSIC by definition."""
    gram, other = (f @ f.T for f in (x, y))
    terms = [
        float(gram[a, b] * (other[a, b] + other[c, d] - 2 * other[a, c]))
        for a, b, c, d in itertools.permutations(range(len(x)), 4)
    ]
    return sum(terms) / len(terms)


def test_hsic_is_the_estimate_written_out():
    x, y = random(7, 3, 2) + 4, random(7, 5, seed=1) - 2
    found = hsic(torch.stack([centred_gram(x), centred_gram(y)]))
    assert found[0, 1].item() == pytest.approx(direct(x, y), rel=1e-9)
    assert found[0, 0].item() == pytest.approx(direct(x, x), rel=1e-9)
    assert found[1, 0].item() == pytest.approx(by_tuples(x.flatten(1), y), rel=1e-8)


def cka(x, y):
    found = hsic(torch.stack([centred_gram(x), centred_gram(y)]))
    return float(found[0, 1] / (found[0, 0] * found[1, 1]).sqrt())


def test_rotated_scaled_and_shifted_features_are_the_same_and_independent_ones_are_not():
    x = random(40, 6)
    rotation, _ = torch.linalg.qr(random(6, 6, seed=2))
    assert cka(x, -3 * x @ rotation + 5) == pytest.approx(1.0, abs=1e-12)
    assert abs(cka(x, random(40, 6, seed=3))) < 0.2
    assert cka(x, x @ torch.diag(torch.tensor([9.0, 1, 1, 1, 1, 1], dtype=torch.float64))) < 0.8


def test_a_large_common_part_costs_no_digits_in_single_precision():
    x = random(8, 1000)
    exact = centred_gram(x)
    assert torch.allclose(centred_gram(x.float() + 100), exact, atol=2e-5 * float(exact.abs().max()), rtol=0)


def seen_by(model, x):
    kept = []
    with torch.no_grad(), watch_units(residual_units(model), lambda number, value: kept.append(value.clone())):
        model(x)
    return kept


def test_a_models_values_are_sums_over_batches_divided_once():
    model = tiny_vit(depth=2, img_size=16)
    batches = images(15, side=16, sizes=(6, 5, 4))
    parts = [seen_by(model, x) for x, _ in batches]
    found = feature_similarity(model, batches)
    assert found.images == 15 and found.left_out == 0 and len(found.names) == 5

    def summed(i, j):
        return sum(len(part[i]) * direct(part[i], part[j]) for part in parts)

    for i, j in itertools.product(range(5), repeat=2):
        expected = summed(i, j) / math.sqrt(summed(i, i) * summed(j, j))
        assert found.similarity[i][j] == pytest.approx(expected, abs=1e-7)
    mean = sum(direct(p[0], p[4]) / math.sqrt(direct(p[0], p[0]) * direct(p[4], p[4])) for p in parts) / 3
    assert found.similarity[0][4] != pytest.approx(mean, abs=1e-4), "not the mean of the batches' values"


def test_few_images_and_units_that_see_no_difference():
    model = tiny_vit()
    found = feature_similarity(model, images(7, sizes=(4, 3)))
    assert (found.images, found.left_out) == (4, 3)
    with pytest.raises(UsageError, match="4 images or more"):
        feature_similarity(model, images(6, sizes=(3, 3)))
    with torch.no_grad():
        model.patch_embed.proj.weight.zero_()
    blind = feature_similarity(model, images(4)).to_dict()
    assert all(value is None for row in blind["similarity"] for value in row)
    assert "the same features" in diagnostic("cka").read(blind)[0]
    assert diagnostic("cka").numbers(blind) == {} and diagnostic("cka").draw([Run("a", blind)])


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_maps_and_tokens_of_any_layout(name):
    model = timm_model(name).double()
    side = 160 if name == "test_vit" else 32
    found = feature_similarity(model, images(4, side=side))
    parts = seen_by(model, images(4, side=side)[0][0])
    expected = direct(parts[0], parts[-1]) / math.sqrt(direct(parts[0], parts[0]) * direct(parts[-1], parts[-1]))
    assert found.similarity[0][-1] == pytest.approx(expected, abs=1e-6)


BLOCKS = {
    "names": ["stem", "a.attn", "a.mlp", "down", "b.attn", "b.mlp"],
    "kinds": ["other", "msa", "mlp", "subsampling", "msa", "mlp"],
    "similarity": [[1.0 if i == j else 0.995 if i // 3 == j // 3 else 0.25 for j in range(6)] for i in range(6)],
    "images": 8,
    "left_out": 0,
}


def test_the_reading_finds_stages_and_units_that_change_little():
    text = " ".join(diagnostic("cka").read(BLOCKS))
    assert "0.99 within a stage and 0.25 between stages" in text or "1.00 within" in text
    assert (
        "as Park and Kim (2022) find for all multi-stage models" in text
        and "down changes the features most: CKA 0.25" in text
    )
    assert "4 of 5 units hardly change the features" in text
    numbers = diagnostic("cka").numbers(BLOCKS)
    assert numbers["mean CKA between stages"] == pytest.approx(0.25)
    assert numbers["lowest CKA of neighbouring units"] == pytest.approx(0.25)


def test_two_models_are_drawn_side_by_side_with_stem_and_subsampling_marked():
    (picture,) = diagnostic("cka").draw([Run("a", BLOCKS), Run("b", BLOCKS)])
    left, right, _ = picture.figure.axes
    assert [text.get_text() for text in left.get_xticklabels()] == ["E", "P"]
    assert left.get_position().x1 < right.get_position().x0 and right.get_title() == "b"
    assert left.collections[0].get_array().reshape(6, 6)[0, 5] == pytest.approx(0.25)
