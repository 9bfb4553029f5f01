"""FGSM by hand in fp64, PGD inside of its ball, accuracies by a loop; the model keeps no trace of its gradients."""

import pytest
import torch
import torch.nn.functional as F

from tests.vtk.analysis._models import timm_model, tiny_vit
from tests.vtk.analysis._robust import (
    STD,
    context,
    draws,
    labelled,
    linear,
    pictures,
    pictures_and_words,
    spec,
    to_input,
    to_pixels,
)
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.measures.attacks import attack_accuracy, fgsm, gradient, pgd
from vtk.errors import UsageError


def test_fgsm_of_a_linear_model_is_the_formula_by_hand():
    of, model = spec(), linear()
    ((x, y),) = pictures(6, of)
    pixels = to_pixels(x, of)
    weight, bias = model[1].weight.detach(), model[1].bias.detach()
    probabilities = torch.softmax(x.flatten(1) @ weight.T + bias, dim=1)
    slope = (probabilities - F.one_hot(y, 3)) @ weight  # dL/dx of cross-entropy, input space
    std = torch.tensor(STD, dtype=torch.float64)[:, None, None]
    by_hand = slope.view_as(x) / std
    assert torch.allclose(gradient(model, pixels, y, spec=of), by_hand, atol=1e-12)
    assert torch.allclose(fgsm(model, pixels, y, 2 / 255, spec=of), (pixels + 2 / 255 * by_hand.sign()).clamp(0, 1))


def test_the_gradient_is_the_losss_slope_by_differences_through_attention():
    of, model = spec(), tiny_vit(depth=2)
    ((x, y),) = pictures(2, of)
    pixels = to_pixels(x, of)
    found = gradient(model, pixels, y, spec=of)
    direction = torch.randn(pixels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = [to_input(pixels + s * 1e-5 * direction, of) for s in (1, -1)]
    with torch.no_grad():
        ends = [F.cross_entropy(model(z), y, reduction="sum") for z in moved]
    assert float((found * direction).sum()) == pytest.approx(float((ends[0] - ends[1]) / 2e-5), rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 2 / 255, 0.5])
def test_attacks_stay_in_the_ball_and_in_the_picture(epsilon):
    of, model = spec(), tiny_vit()
    ((x, y),) = pictures(5, of)
    pixels = to_pixels(x, of).clamp(0, 1)
    pixels[0, :, :4], pixels[1, :, :4] = 0, 1
    start = 2 * draws(pixels).uniform("s") - 1
    for attacked in (
        fgsm(model, pixels, y, epsilon, spec=of),
        pgd(model, pixels, y, epsilon, spec=of, start=start),
        pgd(model, pixels, y, epsilon, spec=of, start=start, step=10.0),
    ):
        assert 0 <= attacked.min() <= attacked.max() <= 1
        assert float((attacked - pixels).abs().max()) <= epsilon + 1e-15


def test_pgd_of_a_linear_model_ends_in_the_corner_that_fgsm_reaches():
    of, model = spec(), linear()
    ((x, y),) = pictures(6, of)
    pixels = 0.25 + 0.5 * to_pixels(x, of)
    with torch.no_grad():  # of two classes, so that the direction is the same everywhere
        model[1].weight[2], model[1].bias[2] = 0, -1e3
    y = y.clamp_max(1)
    start = torch.zeros_like(pixels)
    found = pgd(model, pixels, y, 0.1, spec=of, start=start)
    assert torch.allclose(found, fgsm(model, pixels, y, 0.1, spec=of), atol=1e-12)
    one = pgd(
        model, pixels, y, 0.1, spec=of, start=start, steps=3
    )  # Chen et al. (2022): an eighth of the radius a step
    assert float((one - pixels).abs().max()) == pytest.approx(3 * 0.1 / 8)


def test_pgd_raises_the_loss_and_starts_where_it_is_told():
    of, model = spec(), tiny_vit()
    ((x, y),) = labelled(model, pictures(8, of))
    pixels = to_pixels(x, of)
    loss = lambda z: float(F.cross_entropy(model(to_input(z, of)), y).detach())  # noqa: E731
    start = 2 * draws(pixels).uniform("PGD's start") - 1
    found = pgd(model, pixels, y, 0.05, spec=of, start=start)
    assert loss(found) > loss(pixels) and loss(found) >= loss(fgsm(model, pixels, y, 0.05, spec=of)) - 0.05
    first = pgd(model, pixels, y, 0.05, spec=of, start=start, steps=1, step=0.0)
    assert torch.allclose(first, (pixels + 0.05 * start).clamp(0, 1))


def test_accuracy_is_that_of_a_loop_by_hand_whatever_the_batches():
    of, model = spec(), tiny_vit()
    batches = pictures(24, of)
    radii = (2.0, 40.0)
    found = attack_accuracy(model, batches, spec=of, epsilons=(40.0, 2.0), seed=4)
    ((x, y),) = batches
    pixels = to_pixels(x, of)
    start = 2 * draws(pixels, seed=4).uniform("PGD's start") - 1
    clean = model(x).argmax(1) == y
    standing = clean
    for i, radius in enumerate(radii):
        one = model(to_input(fgsm(model, pixels, y, radius / 255, spec=of), of)).argmax(1) == y
        ten = model(to_input(pgd(model, pixels, y, radius / 255, spec=of, start=start), of)).argmax(1) == y
        standing = standing & ten
        assert found.curves[0].accuracies[i] == float((clean & one).double().mean())
        assert found.curves[1].accuracies[i] == float(standing.double().mean())
    assert found.clean == float(clean.double().mean()) > found.curves[0].accuracies[1]
    assert found.curves[1].strengths == radii and [curve.name for curve in found.curves] == ["FGSM", "PGD-10"]
    pieces = list(zip(x.split(7), y.split(7), strict=True))
    assert attack_accuracy(model, pieces, spec=of, epsilons=radii, seed=4) == found


def test_no_radius_is_clean_and_no_gradient_stays():
    of, model = spec(), tiny_vit(drop_path_rate=0.5).train()
    model.norm.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = [p.requires_grad for p in model.parameters()]
    state = torch.get_rng_state()
    found = attack_accuracy(model, labelled(model.eval(), pictures(6, of)), spec=of, epsilons=(0.0,))
    assert found.clean == 1 and [curve.accuracies for curve in found.curves] == [(1.0,), (1.0,)]
    assert all(p.grad is None for p in model.parameters()) and wanted == [p.requires_grad for p in model.parameters()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_frozen_parameters_and_batch_norm_are_attacked_too():
    model = timm_model("test_resnet", num_classes=3).double()
    for p in model.parameters():
        p.requires_grad_(False)
    of = spec(32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = attack_accuracy(model, labelled(model, pictures(4, of)), spec=of, epsilons=(8.0,))
    assert found.clean == 1 and all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_options_out_of_range_and_soft_labels_are_refused():
    of = spec()
    for options, text in (({"epsilons": (-1.0,)}, "`epsilons`"), ({"steps": 0}, "`steps`")):
        with pytest.raises(UsageError, match=text):
            attack_accuracy(tiny_vit(), pictures(1, of), spec=of, **options)
    soft = [(x, F.one_hot(y, 3).double()) for x, y in pictures(2, of)]
    with pytest.raises(UsageError, match="one class number for each image"):
        attack_accuracy(tiny_vit(), soft, spec=of)


def test_the_diagnostic_draws_and_reads():
    one = diagnostic("attacks")
    found = one.measure(context(epsilons=(0.5, 2.0)))
    assert list(found["curves"][1]["strengths"]) == [0.5, 2.0] and found["clean"] == 1
    pictures_and_words(one, found, runs=2)
    pgd_curve = {**found["curves"][1], "accuracies": [0.8, 0.2]}
    told = one.read({**found, "clean": 0.9, "classes": 10, "images": 500, "curves": [found["curves"][0], pgd_curve]})
    assert "80.0 % at 0.5/255, 20.0 % at 2/255" in told[2] and "--adversarial 2" in told[3]
    fgsm_curve = {**found["curves"][0], "accuracies": [0.8, 0.1]}
    told = one.read({**found, "clean": 0.9, "classes": 10, "images": 500, "curves": [fgsm_curve, pgd_curve]})
    assert "Where PGD leaves more than FGSM" in told[3] and "--adversarial 2" in told[4]
