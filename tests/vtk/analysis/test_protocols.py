"""Protocols of the papers: which images, loss and iteration they give a diagnostic, and what overrides them."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.vtk.analysis._models import images, tiny_vit
from tests.vtk.analysis.measures.test_ntk import jacobian
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostic_names import NAMES
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.diagnostics.base import Context
from vtk.analysis.protocols import OPTIONS, PROTOCOLS, TRAINING, describe, settings_of
from vtk.card import InputSpec

PAPERS = {  # read in the papers' text
    ("park-kim", "hessian"): {
        "split": "train", "share": 0.1, "loss_images": "augmented", "weight_decay": 5e-2, "hessian_batch": 16, "top": 5,
        "hessian_method": "power", "hessian_iterations": 100, "hessian_tol": 1e-3,
    },
    ("park-kim", "landscape"): {
        "split": "train", "loss_images": "augmented", "weight_decay": 5e-2, "directions": "reference", "grid": 21,
    },
    ("park-kim", "fourier"): {"split": "val", "share": 1.0},
    ("park-kim", "lesion"): {"split": "val", "lesion_convs": True},
    ("chen", "hessian-blocks"): {
        "split": "train", "share": 0.1, "loss_images": "plain", "weight_decay": 0.0, "hessian_method": "power",
        "hessian_iterations": 100,
    },
    ("chen", "ntk"): {"split": "train", "share": 0.1, "ntk_relu": True, "ntk_init": True},
    ("chen", "flatness"): {"split": "train", "draws": 1000, "weight_decay": 0.0},
    ("chen", "miss-rate"): {"split": "train"},
    ("chen", "landscape"): {"split": "train", "share": 0.1, "loss_images": "plain", "directions": "filter"},
    ("chen", "neurons"): {"split": "train", "share": 0.1},
    ("chen", "attacks"): {"split": "val", "epsilons": (2.0,)},
    ("hyeon-woo", "occlusion"): {"split": "val", "share": 1.0},
    ("hyeon-woo", "entropy"): {"split": "val", "share": None},
    ("wang", "similarity"): {"split": "val", "share": None},
}  # fmt: skip


@pytest.mark.parametrize(("protocol", "name"), PAPERS)
def test_a_protocol_measures_as_its_paper_says(protocol, name):
    found = settings_of(AnalyzeConfig(protocol=protocol), name)
    wanted = PAPERS[protocol, name]
    assert {option: getattr(found, option) for option in wanted} == wanted
    assert found.limit(3000) == (3000 * wanted["share"] if wanted.get("share") else 512)


def test_the_diagnostics_of_a_protocol_are_those_of_its_paper():
    for protocol in PROTOCOLS:
        chosen = AnalyzeConfig(protocol=protocol).chosen()
        assert set(chosen) == set(PROTOCOLS[protocol].settings) <= set(NAMES)
        assert {name for name in chosen if "Park" in diagnostic(name).source} >= (
            {"hessian", "fourier"} if protocol == "park-kim" else set()
        )
    assert AnalyzeConfig(protocol="chen", what=("hessian",)).chosen() == ("hessian",)


OTHER = {
    "split": "all", "max_images": 7, "hessian_images": 9, "hessian_batch": 3, "hessian_method": "lanczos",
    "hessian_iterations": 5, "hessian_tol": 0.5, "top": 1, "loss_images": "plain", "weight_decay": 0.0, "grid": 11,
    "directions": "filter", "perturb_vectors": True, "draws": 4, "epsilons": (1.0,), "ntk_relu": False,
    "ntk_init": False, "lesion_convs": False,
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_an_explicit_option_overrides_every_protocol_also_with_the_default_value(option):
    assert set(OTHER) == set(OPTIONS)
    for protocol in (None, *PROTOCOLS):
        config = AnalyzeConfig(protocol=protocol, **{option: OTHER[option]})
        for name in NAMES:
            assert getattr(settings_of(config, name), option) == OTHER[option], (protocol, name)


def test_an_explicit_number_of_images_takes_the_place_of_the_papers_share():
    few = settings_of(AnalyzeConfig(protocol="chen", max_images=50), "hessian-blocks")
    assert few.limit(3000) == 50 and few.hessian_images is None
    more = settings_of(AnalyzeConfig(protocol="chen", hessian_images=700), "hessian-blocks")
    assert more.limit(3000) == 700 == more.hessian_images  # enough are loaded
    assert settings_of(AnalyzeConfig(protocol="chen", hessian_images=700), "neurons").limit(3000) == 300
    assert settings_of(AnalyzeConfig(protocol="chen"), "neurons").limit(3) == 1
    assert "unlike the paper's" in describe(AnalyzeConfig(protocol="chen", split="val"), "hessian-blocks")
    fewer = describe(AnalyzeConfig(protocol="chen", max_images=50), "neurons")
    assert "at most 50 images" in fewer and "--max-images given, unlike the paper's" in fewer
    told = describe(AnalyzeConfig(protocol="park-kim"), "hessian")
    assert "split train, 10 % of its images, loss-images augmented, weight-decay 0.05" in told and "unlike" not in told


def test_without_a_protocol_the_loss_is_measured_on_training_images_and_the_rest_on_held_out_ones():
    splits = {name: settings_of(AnalyzeConfig(), name).split for name in NAMES}
    assert {name for name, split in splits.items() if split == "train"} == set(TRAINING)
    assert {"hessian", "hessian-blocks", "ntk", "flatness", "miss-rate", "landscape"} < set(TRAINING)
    assert splits["calibration"] == splits["entropy"] == splits["attacks"] == "val"


AS_CHEN = {
    "images": "training", "loss": "cross-entropy", "loss_images": "plain", "weight_decay": 0.0, "protocol": None,
}  # fmt: skip


@pytest.mark.parametrize("change", [
    {"images": "held-out"}, {"images": "partly training"}, {"images": "all"}, {"loss": "binary cross-entropy"},
    {"loss_images": "augmented"}, {"weight_decay": 0.05}, None,
], ids=str)  # fmt: skip
def test_figures_of_a_paper_stand_only_beside_its_protocol(change):
    blocks, missed, kernel = (diagnostic(name) for name in ("hessian-blocks", "miss-rate", "ntk"))
    sharp = {
        "lambda_max": {"whole": 1292.0}, "lambda_largest_magnitude": {"whole": 1292.0}, "values": {"whole": [1292.0]},
        "converged": {"whole": True}, "products": 9, "images": 4,
    }  # fmt: skip
    rate = {"rate": 0.5, "pairs": 100}
    ntk = {
        "condition": 9.0, "conditions": [9.0], "eigenvalues": [[9.0, 1.0]], "block_images": 48, "rectified": True,
        "initial": True,
    }  # fmt: skip
    for one, result, figure in ((blocks, sharp, "180 to 1,644"), (missed, rate, "--mixup"), (kernel, ntk, "4,205")):
        same, other = {**result, "measurement": AS_CHEN}, dict(result)
        if change is not None:
            other["measurement"] = {**AS_CHEN, **change}
        assert figure in " ".join(one.read(same))
        if one is not kernel or set(change or {}) & {"images"} or change is None:
            assert figure not in " ".join(one.read(other))
        if change is not None:
            kind = other["measurement"]["images"]
            assert all(name.endswith(f", {kind} images") for name in one.numbers(other))  # never in one row with others
            assert f"Measured on {kind} images" in " ".join(one.read(other))


def test_depths_and_neurons_are_compared_with_the_paper_on_its_images_only():
    values = {"whole": 90.0, **{f"block {i}": 60.0 / i for i in range(1, 5)}}
    steep = {
        "lambda_max": values, "lambda_largest_magnitude": values, "values": {k: [v] for k, v in values.items()},
        "converged": dict.fromkeys(values, True), "products": 9, "images": 4,
    }  # fmt: skip
    layer = {"block": 1, "kind": "MLP", "active": 0.2, "never": 0, "always": 0, "neurons": 8, "function": "GELU"}
    sparse = {"layers": [layer], "images": 4, "unseen": []}
    for one, result, word in (
        (diagnostic("hessian-blocks"), steep, "as Chen et al. (2022) find"),
        (diagnostic("neurons"), sparse, "less than 10 %"),
    ):
        assert word in " ".join(one.read({**result, "measurement": AS_CHEN}))
        assert word not in " ".join(one.read({**result, "measurement": {**AS_CHEN, "images": "held-out"}}))
        assert word not in one.explains


@pytest.mark.parametrize("change", [{"rectified": False}, {"initial": False}, {"block_images": 24}], ids=str)
def test_the_kernels_figures_need_its_weights_activation_and_blocks(change):
    result = {
        "condition": 9.0, "conditions": [9.0], "eigenvalues": [[9.0, 1.0]], "block_images": 48, "rectified": True,
        "initial": True, "measurement": AS_CHEN,
    }  # fmt: skip
    one = diagnostic("ntk")
    assert "4,205" in " ".join(one.read(result)) and "4,205" not in " ".join(one.read({**result, **change}))


def context(name, model, batches, **options) -> Context:
    return Context(
        model, InputSpec(8, 8), ("a", "b", "c"), False, torch.device("cpu"), AnalyzeConfig(**options),
        lambda size: batches, lambda size: pytest.fail("augmented"), 8, name=name, images_kind="training",
        fresh=lambda: tiny_vit(5),
    )  # fmt: skip


def test_chens_kernel_is_that_of_new_weights_with_relu():
    batches = images(8)
    found = diagnostic("ntk").measure(context("ntk", tiny_vit(), batches, protocol="chen"))
    fresh = tiny_vit(5)
    for block in fresh.blocks:
        block.mlp.act = torch.nn.ReLU()
    rows = jacobian(fresh.float().double(), batches[0][0], "sum")
    singular = torch.linalg.svdvals(rows)
    assert found["condition"] == pytest.approx(float(singular[0] / singular[-1]) ** 2, rel=1e-2)
    assert found["rectified"] is True and found["initial"] is True
    given = diagnostic("ntk").measure(context("ntk", tiny_vit(), batches))
    singular = torch.linalg.svdvals(jacobian(tiny_vit(), batches[0][0], "sum"))
    assert given["condition"] == pytest.approx(float(singular[0] / singular[-1]) ** 2, rel=1e-6)
    assert given["rectified"] is False and given["initial"] is False
    unknown = dataclasses.replace(context("ntk", tiny_vit(), batches, protocol="chen"), fresh=None)
    with pytest.raises(Exception, match="give --no-ntk-init"):
        diagnostic("ntk").measure(unknown)


def test_park_and_kims_loss_has_its_l2_term_and_augmented_images():
    model, plain, augmented = tiny_vit(), images(8), images(8, seed=7)
    given = dataclasses.replace(
        context("hessian", model, plain, protocol="park-kim", top=1, hessian_method="lanczos", hessian_tol=1e-6),
        augmented=lambda size: augmented,
    )
    found = diagnostic("hessian").measure(given)
    without = dataclasses.replace(given, config=dataclasses.replace(given.config, weight_decay=0.0))
    assert found["lambda_max"][0] == pytest.approx(diagnostic("hessian").measure(without)["lambda_max"][0] + 0.05)
    assert given.measurement() == {
        "images": "training", "loss": "cross-entropy", "loss_images": "augmented", "weight_decay": 0.05,
        "protocol": "park-kim",
    }  # fmt: skip


def test_the_noise_rise_is_the_loss_that_the_noise_adds():
    model, batches = tiny_vit(), images(8)
    found = diagnostic("flatness").measure(context("flatness", model, batches, draws=2, sigma=0.05))
    x, y = batches[0]
    generator = torch.Generator().manual_seed(0)
    noise = [(0.05 * torch.randn(p.shape, generator=generator)).double() for p in model.parameters()]
    losses = []
    with torch.no_grad():
        for sign in (0, 1, -2):  # back from +1
            for p, change in zip(model.parameters(), noise, strict=True):
                p.add_(change, alpha=sign)
            losses.append(float(F.cross_entropy(model(x), y)))
    assert found["noise_rise"] == pytest.approx((losses[1] + losses[2]) / 2 - losses[0], rel=1e-6)
    numbers = diagnostic("flatness").numbers({**found, "measurement": AS_CHEN})
    assert numbers["noise rise of 0.05, training images"] == found["noise_rise"]
    old = {name: value for name, value in found.items() if name != "noise_rise"}
    assert diagnostic("flatness").numbers(old)["noise rise of 0.05"] == pytest.approx(found["noise_rise"])


@pytest.mark.parametrize("given, most", [({"hessian_images": 9}, 9), ({"max_images": 30}, 30),
                                         ({"hessian_images": 900}, 900)])  # fmt: skip
def test_a_protocol_says_how_many_images_its_curvature_is_of(given, most):
    config = AnalyzeConfig(protocol="chen", **given)
    assert f"split train, at most {most} images," in describe(config, "hessian-blocks")
