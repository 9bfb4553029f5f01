"""The cost model: its constants stay near what the card reached, and it predicts models that its fit has not seen."""

import csv
from dataclasses import astuple, replace

import _bounds
import _cost
import _fit
import predict
import pytest
import roofline
from _cost import CEILING, FORMS, NAMES, PLAUSIBLE, SIZES, SLACK, Constants, Kernel, kernels_of, pass_us
from _models import END_TO_END

MEASURED = _fit.load(predict._rows.RESULTS)
GUESS = Constants(7.0, 1.0, 4000.0, 3000.0, 700.0, 1.0, 2.0, 0.1, 1.0, 250.0, 60.0, 80.0, 15.0, 30.0)


@pytest.fixture(scope="module")
def fitted():
    return _fit.fit(MEASURED)


def errors(constants):
    found = _fit.predictions(MEASURED.latencies, constants)
    return {cell: found[cell] / us - 1 for cell, us in MEASURED.latencies.items()}


def test_what_is_fitted_is_what_one_commit_measured_in_a_graph():
    with (predict._rows.RESULTS / "gpu_e2e.csv").open(newline="") as file:
        mine = [r for r in csv.DictReader(file) if (r["git"], r["provider"]) == ("fd6ca4a", "fused+graph")]
    assert len(MEASURED.latencies) == len(mine) == 28 and len(MEASURED.subjects) == 7
    assert sorted(MEASURED.latencies.values()) == sorted(1e3 * float(r["median_ms"]) for r in mine)


def test_each_model_and_size_is_predicted_within_a_fifth_without_any_of_its_rows():
    found = _fit.leave_one_out(MEASURED)
    assert found.keys() == MEASURED.latencies.keys()
    assert {cell: f"{ratio - 1:+.1%}" for cell, ratio in found.items() if abs(ratio - 1) > 0.20} == {}


def test_what_is_left_out_has_no_part_in_the_fit():
    subject = ("S18x2", 224)
    wrong = _fit.Measured(
        {cell: us * (10 if cell[:2] == subject else 1) for cell, us in MEASURED.latencies.items()},
        {c: {n: us * (3 if c[:2] == subject else 1) for n, us in g.items()} for c, g in MEASURED.groups.items()},
        MEASURED.ceilings,
    )  # fmt: skip
    assert _fit.fit(wrong.without(subject)) == _fit.fit(MEASURED.without(subject)) != _fit.fit(wrong)


def test_constants_stay_near_their_ceilings_and_are_plausible(fitted):
    with (predict._rows.RESULTS / "gpu_ceilings.csv").open(newline="") as file:
        ceilings = {row["what"]: float(row["value"]) for row in csv.DictReader(file) if row["git"] == "fd6ca4a"}
    assert SLACK == 1.5 and {"launch", "gap", "copy", "gemm"} <= CEILING.keys()
    assert {*CEILING, *PLAUSIBLE} == set(NAMES)
    for name in NAMES:
        value = getattr(fitted, name)
        if name in CEILING:
            assert 1 / 1.5 <= value / ceilings[CEILING[name]] <= 1.5, name
        else:
            low, high = PLAUSIBLE[name]
            assert low <= value <= high, name


@pytest.mark.parametrize(("name", "factor"), [
    ("gemm", 0.5), ("prologue", 2), ("step", 3), ("attention", 0.2), ("gap", 3), ("launch", 5), ("copy", 0.3),
    ("gelu", 0.3), ("conv_b", 4), ("conv_s_rate", 0.25),
])  # fmt: skip
def test_a_constant_that_is_far_off_misses_the_bound(fitted, name, factor):
    assert max(map(abs, errors(fitted).values())) < 0.20
    assert max(map(abs, errors(replace(fitted, **{name: factor * getattr(fitted, name)})).values())) > 0.20


def test_a_fit_is_the_same_from_other_data_of_the_same_card(fitted):
    exact = {cell: pass_us(kernels_of(*cell, "fd6ca4a"), GUESS) for cell in MEASURED.latencies}
    groups = {}
    for cell in MEASURED.groups:
        found = dict.fromkeys((*MEASURED.groups[cell],), 0.0)
        for k in kernels_of(*cell, "fd6ca4a"):
            found[k.group] += k.count * (k.us(GUESS) + _fit.INSIDE * GUESS.gap)
        groups[cell] = found
    ceilings = {"launch": 7.0, "graph_gap": 1.0, "copy": 4000.0, "gemm": 700.0}
    again = _fit.fit(_fit.Measured(exact, groups, ceilings))
    assert astuple(again) == pytest.approx(astuple(GUESS), rel=0.15) and again != GUESS != fitted


def test_products_are_quantised_to_waves_and_bound_by_what_they_move():
    c = replace(GUESS, step=0.0, copy=1e9)
    one, two = (_cost.product_us(rows, 256 * 132, 6400, c) for rows in (128, 129))
    assert one == pytest.approx(2e-6 * 128 * 256 * 132 * 6400 / c.gemm) and 1.05 < two / one < 1.6
    assert _cost.product_us(1, 64, 6400, GUESS) == 100 * GUESS.step  # one tile: loads in flight, one step after another
    moved = 2 * (64 * 64 + 64 * 10**6 + 64 * 10**6)
    assert _cost.product_us(64, 10**6, 64, replace(GUESS, gemm=1e6, step=0.0)) == pytest.approx(
        1e-3 * moved / GUESS.copy
    )


def test_a_kernel_that_is_chained_has_no_gap_and_one_with_a_prologue_hidden_less_of_it():
    plain = Kernel("norms", "pass", 3, (4e6,))
    assert pass_us([plain], GUESS) == pytest.approx(7 * 7.0 + 3 * (1.0 + 1.0 + 1.0))
    assert pass_us([replace(plain, chained=True)], GUESS) == pytest.approx(7 * 7.0 + 3 * 2.0)
    product = Kernel("matrix products", "product", 1, (64, 64, 64))
    assert product.us(GUESS) - replace(product, hidden=0.5).us(GUESS) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "name", ["S18x2", "B/16", *(pytest.param(n, marks=pytest.mark.slow) for n in ("S36x1", "B18x2", "S/16", "B36x1"))]
)
def test_sizes_are_those_of_timm(name):
    model, sizes = roofline.on_meta(END_TO_END[name], 224), SIZES[name]
    block = model.blocks[0]
    attention, ffn = (block.attns[0].attn, block.ffns[0].mlp) if sizes.branches > 1 else (block.attn, block.mlp)
    assert (len(model.blocks), model.embed_dim, attention.num_heads) == (sizes.depth, sizes.channels, sizes.heads)
    assert len(getattr(block, "attns", [0])) == sizes.branches and ffn.fc1.out_features == 4 * sizes.channels


@pytest.mark.parametrize(("model", "px", "batch"), MEASURED.groups)
def test_products_and_attentions_are_as_many_as_were_profiled(model, px, batch):
    with (predict._rows.RESULTS / "gpu_breakdown.csv").open(newline="") as file:
        mine = [r for r in csv.DictReader(file) if (r["model"], r["batch"], r["git"]) == (model, str(batch), "fd6ca4a")]
    found = {}
    for k in kernels_of(model, px, batch, "fd6ca4a"):
        found[k.group] = found.get(k.group, 0) + k.count
    calls = dict.fromkeys(found, 0)
    for row in mine:
        if row["kernel"] != "gaps" and "splitKreduce" not in row["kernel"]:
            calls[_fit._groups.group_of(row["kernel"])] += int(row["calls"])
    assert [found[g] - calls[g] for g in ("matrix products", "attention", "norms")] == [0, 0, 0]


def test_every_form_does_the_same_products_and_the_later_ones_fewer_kernels(fitted):
    for model, batch in (("S18x2", 1), ("B/16", 64)):
        by_form = {form: kernels_of(model, 224, batch, form) for form in FORMS}
        work = {f: sum(k.count * k.sizes[0] * k.sizes[1] * k.sizes[2] for k in ks if k.kind == "product")
                for f, ks in by_form.items()}  # fmt: skip
        stem = batch * 197 * SIZES[model].channels * 768
        assert {f: w - (0 if f == "fd6ca4a" else stem) for f, w in work.items()} == dict.fromkeys(
            FORMS, work["fd6ca4a"]
        )
        count = {f: sum(k.count for k in ks) for f, ks in by_form.items()}
        assert count["fd6ca4a"] > count["before"] == count["after"] > count["before, folded"] == count["after, folded"]
        times = [pass_us(by_form[f], fitted) for f in ("fd6ca4a", "before", "after")]
        assert times == sorted(times, reverse=True)


def test_committed_predictions_are_those_of_the_model(tmp_path, capsys):
    assert predict.main(["--check"]) == 0
    assert "is what the model predicts" in capsys.readouterr().out
    text = (predict._rows.RESULTS / _bounds.PREDICTIONS).read_text()
    made = list(csv.DictReader(text.splitlines()))
    assert predict.differences(predict._rows.RESULTS / _bounds.PREDICTIONS, made) == []
    made[3] = made[3] | {"ms": str(1.1 * float(made[3]["ms"]))}
    made[5] = made[5] | {"batch": "3"}
    assert len(predict.differences(predict._rows.RESULTS / _bounds.PREDICTIONS, made)) == 3
    assert predict.main(["--results", str(tmp_path)]) == 1 and "no rows of commit fd6ca4a" in capsys.readouterr().err
