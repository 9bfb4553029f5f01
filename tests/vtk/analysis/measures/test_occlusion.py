"""What is hidden is exactly the stated centre, and accuracies are those of masks by hand."""

import pytest
import torch

from tests.vtk.analysis._models import tiny_vit
from tests.vtk.analysis._robust import (
    Recorder,
    context,
    labelled,
    pictures,
    pictures_and_words,
    spec,
    to_input,
    to_pixels,
)
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.measures.occlusion import hide_centre, occlusion_accuracy
from vtk.errors import UsageError


def test_the_papers_size_hides_112_of_224_pixels_in_the_middle():
    hidden = hide_centre(torch.ones(1, 3, 224, 224), 0.5)
    assert int((hidden == 0).sum()) == 3 * 112 * 112
    assert hidden[..., 56:168, 56:168].sum() == 0 and hidden[0, 0, 55].all() and hidden[0, 0, 168].all()


@pytest.mark.parametrize("side", [0.0, 0.125, 0.3, 1.0])
@pytest.mark.parametrize("size", [(64, 64), (33, 47)], ids=str)
def test_exactly_the_stated_area_is_black_and_nothing_else_changes(side, size):
    x = torch.rand(2, 5, *size) + 0.1
    hidden = hide_centre(x, side)
    black = (hidden == 0).all(dim=1)
    rows, columns = round(side * size[0]), round(side * size[1])
    assert black.flatten(1).sum(1).tolist() == [rows * columns] * 2
    assert torch.equal(hidden[~black[:, None].expand_as(x)], x[~black[:, None].expand_as(x)])
    if rows:
        where = black[0].any(1).nonzero().flatten()
        assert abs(int(where[0]) - (size[0] - 1 - int(where[-1]))) <= 1  # in the middle


def test_accuracy_is_that_of_masks_by_hand():
    of, model = spec(), tiny_vit()
    batches = labelled(model, pictures(12, of))
    found = occlusion_accuracy(model, batches, spec=of, sides=(0.0, 0.5, 1.0))
    (x, y) = batches[0]
    half = to_pixels(x, of)
    half[:, :, 2:6, 2:6] = 0
    by_hand = [float((model(to_input(z, of)).argmax(1) == y).double().mean()) for z in (half, torch.zeros_like(half))]
    assert found.centre.accuracies == (1.0, *by_hand) and found.areas == (0, 0.25, 1) and by_hand[1] < 1
    pieces = list(zip(x.split(5), y.split(5), strict=True))
    assert occlusion_accuracy(model, pieces, spec=of, sides=(0.0, 0.5, 1.0)) == found


def test_black_is_black_after_the_inputs_normalisation():
    of, model = spec(8, 1), Recorder()
    occlusion_accuracy(model, pictures(1, of), spec=of, sides=(1.0,))
    assert torch.allclose(model.seen[-1], torch.tensor(-of.mean[0] / of.std[0], dtype=torch.float64))


def test_sides_beyond_the_image_are_refused():
    with pytest.raises(UsageError, match="`sides`"):
        occlusion_accuracy(tiny_vit(), pictures(1, spec()), spec=spec(), sides=(1.2,))


def test_the_diagnostic_draws_and_reads():
    one = diagnostic("occlusion")
    found = one.measure(context())
    assert found["clean"] == 1 and len(found["areas"]) == 7
    pictures_and_words(one, found, runs=2)
    base = {**found, "clean": 0.9, "classes": 10, "images": 500}
    falling = {**found["centre"], "accuracies": [0.9, 0.9, 0.8, 0.3, 0.2, 0.1, 0.1]}
    told = one.read({**base, "centre": falling})
    assert "the accuracy is 30.0 %: 60.0 points lower" in told[1]
    assert "with 25 % of the area" in told[2] and "--reprob" in told[3]
    told = one.read({**base, "centre": {**found["centre"], "accuracies": [0.9] * 7}})
    assert "the background reveals the classes" in told[2]
