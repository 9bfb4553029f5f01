"""The diagnostics of the loss as `vtk analyze` uses them: options, JSON values, sentences, plots."""

import dataclasses
import json

import pytest
import torch

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import CrossEntropy, hessian_max, loss_landscape
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostics import GROUPS, diagnostic
from vtk.analysis.diagnostics.base import Context, Run
from vtk.analysis.protocols import TRAINING as TRAINED
from vtk.analysis.result_files import Analysis, finite
from vtk.card import InputSpec

OPTIONS = {"batch_size": 4, "hessian_images": 8, "hessian_batch": 4, "top": 2, "grid": 3, "draws": 4}


def context(model=None, count=10, **options):
    whole = images(count, side=32 if model is not None else 8)[0]

    def loader(size):
        return list(zip(*(t.split(size) for t in whole), strict=True))

    config = AnalyzeConfig(**{**OPTIONS, **options})
    spec = InputSpec(8, 8)
    model = tiny_vit() if model is None else model.double()
    return Context(model, spec, ("a", "b", "c"), False, torch.device("cpu"), config, loader, loader, count)


@pytest.fixture(scope="module")
def results():
    return {name: finite(diagnostic(name).measure(context())) for name in GROUPS["loss"]}


@pytest.mark.parametrize("name", GROUPS["loss"])
def test_a_result_is_json_and_is_told_and_drawn_beside_another(results, name):
    one, result = diagnostic(name), results[name]
    assert one.name == name and json.loads(json.dumps(result, allow_nan=False)) == result
    numbers = one.numbers(result)
    assert numbers and all(isinstance(value, float) for value in numbers.values())
    told = one.read(result)
    assert told and all(text.endswith((".", "?")) and "None" not in text and "nan" not in text for text in told)
    assert set(one.options) <= {f.name for f in dataclasses.fields(AnalyzeConfig)}
    assert all(picture.name.startswith(name) and picture.caption for picture in one.draw([Run("vit", result)]))
    for picture in one.draw([Run("vit", result), Run("_$b", result)]):
        picture.figure.canvas.draw()


def test_options_reach_the_measurement(results):
    assert (results["hessian"]["images"], len(results["hessian"]["values"])) == (8, 2)
    assert results["hessian-blocks"]["images"] == results["ntk"]["images"] == 8
    assert results["landscape"]["images"] == results["flatness"]["images"] == results["miss-rate"]["pairs"] == 10
    decayed = diagnostic("hessian").measure(context(weight_decay=0.5, hessian_images=4))["values"][0]
    assert decayed[0] == pytest.approx(results["hessian"]["values"][0][0] + 0.5, rel=1e-2)
    landscape = diagnostic("landscape").measure(context(weight_decay=0.1, directions="reference", perturb_vectors=True))
    expected = loss_landscape(
        tiny_vit(), images(10, sizes=(4, 4, 2)), grid=3, directions="reference", vectors=True,
        loss=CrossEntropy(weight_decay=0.1),
    )  # fmt: skip
    assert landscape == expected.to_dict()


def test_the_whole_is_over_all_images_at_once(results):
    batch = [tuple(t[:8] for t in images(10)[0])]
    expected = hessian_max(tiny_vit(), batch, tol=1e-4).value
    assert results["hessian-blocks"]["values"]["whole"][0] == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("name", ["hessian", "hessian-blocks"])
def test_what_was_kept_is_not_measured_again(results, name):
    kept = []
    measured = diagnostic(name).measure(dataclasses.replace(context(), save=kept.append))
    assert finite(measured) == results[name] and kept[0]["rows"]

    def broken(size):
        first, *others = context().loader(size)
        return [(first[0] * torch.nan, first[1]), *others]

    # the first mini-batch has no numbers in it now; all groups need it
    saved = kept[0] if name == "hessian" else kept[-1]
    found = diagnostic(name).measure(dataclasses.replace(context(), loader=broken, saved=saved))
    assert finite(found) == results[name]


def test_a_resnet_has_parts_without_attention():
    resnet = timm_model("resnet18", layers=(1, 1, 1, 1), channels=(4, 4, 8, 8), num_classes=3)
    result = finite(diagnostic("hessian-blocks").measure(context(resnet, count=4, hessian_images=4)))
    assert list(result["values"]) == ["whole", "embedding", *(f"block {i}" for i in range(1, 5))]
    assert diagnostic("hessian-blocks").read(result)


def test_losses_without_a_value_are_told_and_drawn(results):
    broken = json.loads(json.dumps(results["landscape"]))
    broken["losses"][0][0] = None
    one = diagnostic("landscape")
    assert any("At 1 of 9 points the loss is not finite" in text for text in one.read(broken))
    lost = {**broken, "losses": [[None] * 3] * 3, "centre": None}
    assert one.read(lost)[0] == "The loss is not finite at the model's own weights." and one.numbers(lost) == {}
    for picture in one.draw([Run("a", lost), Run("b", broken)]):
        picture.figure.canvas.draw()


TRAINING = {
    "images": "training", "loss": "cross-entropy", "loss_images": "plain", "weight_decay": 0.0, "protocol": None,
}  # fmt: skip


def curvature(upwards, extreme=None):
    """A result of hessian-blocks: λ_max of each group, and its eigenvalue of largest magnitude."""
    return {
        "measurement": TRAINING, "lambda_max": upwards, "values": {name: [value] for name, value in upwards.items()},
        "lambda_largest_magnitude": extreme or upwards, "converged": dict.fromkeys(upwards, True), "products": 9,
        "images": 4,
    }  # fmt: skip


def test_a_negative_outlier_neither_hides_nor_counts_as_sharpness():
    blocks, hessian = diagnostic("hessian-blocks"), diagnostic("hessian")
    sharp = curvature({"whole": 190.0}, {"whole": -400.0})
    assert "--sam" in " ".join(blocks.read(sharp)) and "whole (-400)" in " ".join(blocks.read(sharp))
    flat = curvature({"whole": 9.0}, {"whole": -400.0})
    assert "--sam" not in " ".join(blocks.read(flat))
    for result, upwards in ((sharp, 190.0), (flat, 9.0)):  # the rows that are compared
        assert blocks.numbers(result) == {
            "λ_max of whole, training images": upwards,
            "λ of largest magnitude, with its sign, training images": -400.0,
        }
    spectrum = {"values": [[-400.0]], "converged": 1.0, "images": 4, "negative_share": 1.0, "positive_mean": None}
    assert "(λ_max) is 190 on average" in " ".join(hessian.read({**spectrum, "lambda_max": [190.0]}))
    assert hessian.numbers({**spectrum, "lambda_max": [8.0, 10.0]})["λ_max of a mini-batch, mean"] == 9.0
    for picture in blocks.draw([Run("a", sharp), Run("b", flat)]):
        heights = [bar.get_height() for bar in picture.figure.axes[0].patches]
        assert heights == [400.0, 190.0, 400.0, 9.0] and "Hatched" in picture.caption


def test_numbers_that_did_not_converge_say_so_and_share_no_row_with_others():
    blocks, hessian = diagnostic("hessian-blocks"), diagnostic("hessian")
    found = {
        **curvature({"whole": 90.0, "msa": 8.0}, {"whole": -400.0, "msa": 8.0}),
        "converged": {"whole": False, "msa": True}, "lambda_max_converged": {"whole": False, "msa": True},
        "magnitude_converged": {"whole": True, "msa": True}, "method": "power",
    }  # fmt: skip
    told = " ".join(blocks.read(found))
    assert "Not converged: λ_max of whole (a lower bound); give more `--hessian-iterations`, or" in told
    assert "`--hessian-method lanczos`" in told
    assert blocks.numbers(found) == {
        "λ_max of whole, not converged: a lower bound, training images": 90.0, "λ_max of MSA, training images": 8.0,
        "λ of largest magnitude, with its sign, training images": -400.0,
    }  # fmt: skip
    other = {**found, "lambda_max_converged": {"whole": True, "msa": True}, "method": "lanczos",
             "magnitude_converged": {"whole": False, "msa": False}}  # fmt: skip
    told = " ".join(blocks.read(other))
    assert "Not converged: the eigenvalue of largest magnitude of whole, MSA (a lower bound of its size)" in told
    assert "lanczos" not in told and "λ_max of whole, training images" in blocks.numbers(other)
    spectrum = {"values": [[3.0, -2.0], [4.0, 1.0]], "converged": 1.0, "images": 4, "negative_share": 0.25,
                "positive_mean": 2.7, "lambda_max": [3.0, 4.0], "lambda_max_converged": [True, False],
                "method": "power"}  # fmt: skip
    assert "Not converged: λ_max of 1 of 2 mini-batches (a lower bound)" in " ".join(hessian.read(spectrum))
    assert "λ_max of a mini-batch, mean, not converged: a lower bound" in hessian.numbers(spectrum)
    settled = {**spectrum, "lambda_max_converged": [True, True]}
    assert "onverged" not in " ".join(hessian.read(settled)) + " ".join(hessian.numbers(settled))


def test_the_reason_of_an_advice_is_the_number_before_it():
    from vtk.analysis.report.summary import advice

    found = advice(Analysis("m", {"hessian-blocks": curvature({"whole": 190.0})}))
    assert found["hessian-blocks"].startswith("The largest curvature of the loss (λ_max) is 190.")


@pytest.mark.parametrize(("method", "top", "once"), [("lanczos", 2, True), ("power", 2, False), ("lanczos", 1, False)])
def test_a_plot_says_where_eigenvalues_that_occur_several_times_are_there_once(method, top, once):
    result = {"values": [[3.0, -2.0][:top]], "converged": 1.0, "images": 4, "negative_share": 0.5,
              "positive_mean": 3.0, "method": method}  # fmt: skip
    (picture,) = diagnostic("hessian").draw([Run("m", result)])
    assert ("several times exactly only once" in picture.caption) == once


@pytest.mark.parametrize("name", TRAINED)
def test_a_result_names_only_the_loss_that_it_is_of(name):
    one = diagnostic(name)
    given = dataclasses.replace(
        context(loss_images="augmented", weight_decay=0.5), name=name, images_kind="training"
    )  # fmt: skip
    found = given.measurement(one.options)
    assert (found["loss_images"] == "augmented") == ("loss_images" in one.options)
    assert (found["weight_decay"] == 0.5) == ("weight_decay" in one.options)


def test_results_of_version_0_1_know_lambda_max_where_the_largest_magnitude_is_positive():
    blocks, hessian = diagnostic("hessian-blocks"), diagnostic("hessian")
    old = {"values": {"whole": [190.0], "msa": [-7.0]}, "converged": {"whole": True, "msa": True}, "products": 9,
           "images": 4}  # fmt: skip
    told = " ".join(blocks.read(old))
    assert "(λ_max) is 190" in told and "MSA (-7)" in told
    assert blocks.numbers(old) == {"λ_max of whole": 190.0, "λ of largest magnitude, with its sign": 190.0}
    unknown = {**old, "values": {"whole": [-400.0], "msa": [-7.0]}}
    assert "not known from this result" in blocks.read(unknown)[0]
    assert list(blocks.numbers(unknown)) == ["λ of largest magnitude, with its sign"]
    blocks.draw([Run("old", old), Run("new", curvature({"whole": 9.0}))])
    spectrum = {"values": [[-9.0, 8.0], [6.0, -3.0]], "converged": 1.0, "images": 4, "negative_share": 0.5,
                "positive_mean": 7.0}  # fmt: skip
    assert hessian.numbers(spectrum)["λ_max of a mini-batch, mean"] == 7.0
    assert "λ_max of a mini-batch, mean" not in hessian.numbers({**spectrum, "values": [[-9.0, -8.0], [6.0, -3.0]]})


def test_readings_follow_the_numbers():
    hessian, blocks = diagnostic("hessian"), diagnostic("hessian-blocks")
    spectrum = {"values": [[3.0, 2.0]], "converged": 1.0, "images": 4, "negative_share": 0.0, "positive_mean": 2.5}
    assert any("close to convex" in text for text in hessian.read(spectrum))
    bent = {**spectrum, "negative_share": 1.0, "positive_mean": None, "converged": 0.5}
    assert any("not convex" in text for text in hessian.read(bent)) and "APE" not in str(hessian.numbers(bent))
    assert any("50 % of the eigenvalues did not converge" in text for text in hessian.read(bent))
    values = {"whole": 9.0, "embedding": 7.0, **{f"block {i}": 6.0 / i for i in range(1, 5)}}
    assert any("Shallow blocks are sharper" in text for text in blocks.read(curvature(values)))
    told = " ".join(blocks.read(curvature({**values, "block 4": 90.0}, {**values, "block 4": -95.0})))
    assert "Deep blocks are sharper" in told and "largest curvature is block 4 (90)" in told
    assert "bends downwards more than upwards" in told and "block 4 (-95)" in told
    flat = diagnostic("flatness")
    quiet = {"loss": 1.0, "noisy_loss": 1.01, "standard_error": 0.01, "sigma": 0.01, "draws": 4, "images": 4}
    assert any("within the noise of the draws" in text for text in flat.read(quiet))
    assert any("minimum is sharp" in text for text in flat.read({**quiet, "noisy_loss": 3.0}))
    assert flat.read({**quiet, "noisy_loss": None})[0].startswith("With noise") and flat.numbers(quiet)["loss"] == 1.0
    ntk = diagnostic("ntk")
    singular = {"condition": None, "conditions": [None], "eigenvalues": [[2.0, 0.0]], "block_images": 2}
    assert "singular" in ntk.read(singular)[0] and ntk.numbers(singular) == {}
    ntk.draw([Run("a", singular)])[0].figure.canvas.draw()
