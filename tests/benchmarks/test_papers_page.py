"""The page of the papers' claims says what the rows say, and nothing of rows of other settings."""

import importlib.util
import json
import sys
from pathlib import Path

import _claims
import numpy as np
import pytest
from papers import pictures, runner
from papers.claims import CLAIMS, Claim
from scipy import stats

REPO = Path(__file__).resolve().parents[2]
SAM = next(e for e in runner.EXPERIMENTS if e.key == "D/sam")


@pytest.fixture(scope="module")
def page():
    """docs/_generate/papers.py, whose name is also that of the benchmarks' package."""
    spec = importlib.util.spec_from_file_location("papers_page", REPO / "docs" / "_generate" / "papers.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


CLAIMS_OF_SAM = (
    Claim("D", "sam", "SAM is flatter", "lambda_max", "SAM", "AdamW", -1, scale="ratio"),
    Claim("D", "sam", "SAM is robust to noise", "noisy_loss", "SAM", "AdamW", -1, scale="ratio"),
    Claim("D", "sam", "SAM is more accurate", "top1", "SAM", "AdamW", 1, tried="ρ of 0.02 and 0.1."),
    Claim("D", "sam", "SAM misses less", "miss_rate", "SAM", "AdamW", -1),
    Claim("D", "sam", "SAM is as accurate", "top1", "SAM", "AdamW", 1, 0.02),
)
VALUES = {
    "top1": {"AdamW": (0.30, 0.32, 0.31, 0.31, 0.31), "SAM": (0.31, 0.30, 0.32, 0.31, 0.31)},
    "lambda_max": {"AdamW": (100.0, 120.0, 110.0, 100.0, 120.0), "SAM": (20.0, 22.0, 24.0, 24.0, 20.0)},
    "noisy_loss": {"AdamW": (1.0, 1.1, 1.2, 1.1, 1.1), "SAM": (2.0, 2.2, 2.4, 2.1, 2.3)},
    "diverged": {"AdamW": (0,) * 5, "SAM": (0,) * 5},
    "cpu_seconds": {"AdamW": (30, 31, 29, 30, 30), "SAM": (61, 60, 60, 62.4, 60), "whole job": (120,) * 5},
}


def rows_of(values, code, settings=None, **changes):
    """Rows of Chen et al. 2022's experiment: metric → variant → values of the seeds."""
    settings = json.dumps(dict(settings or SAM.settings))
    head = {
        "paper": "D", "experiment": "sam", "data": "pets", "train_images": "1000", "digest": "d1", "settings": settings,
    }  # fmt: skip
    return [
        {**head, "variant": variant, "seed": str(seed), "metric": metric, "value": str(value), **code, **changes}
        for metric, variants in values.items() for variant, own in variants.items() for seed, value in enumerate(own)
    ]  # fmt: skip


def lines_of(text):
    """The claims' tables: claim → cells."""
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| SAM ")]
    return {row[0]: row[1:] for row in rows if len(row) == 8}


def test_the_page_has_each_claims_numbers_and_both_verdicts(page, code):
    text = page.page(rows_of(VALUES, code), CLAIMS_OF_SAM)
    lines = lines_of(text)
    for claim, metric in (("SAM is flatter", "lambda_max"), ("SAM is robust to noise", "noisy_loss")):
        logs = np.log(np.divide(VALUES[metric]["SAM"], VALUES[metric]["AdamW"]))
        interval = stats.ttest_1samp(logs, 0).confidence_interval(1 - 0.0048947)  # of the first look
        expected = f"×{np.exp(logs.mean()):.2f} (×{np.exp(interval.low):.2f} to ×{np.exp(interval.high):.2f})"
        assert expected in lines[claim]
    assert lines["SAM is flatter"][:4] == ["λ_max: SAM / AdamW", "**shown**", "shown", "5"]
    assert lines["SAM is robust to noise"][1] == "**reversed**"
    errors = np.subtract(VALUES["top1"]["SAM"], VALUES["top1"]["AdamW"])
    error, t = errors.std(ddof=1) / 5**0.5 * 100, stats.t(4)
    width, detectable = error * t.isf(0.0048947 / 2), error * (t.isf(0.0048947 / 2) + t.ppf(0.8))
    assert lines["SAM is more accurate"] == [
        "top-1, %: SAM − AdamW", "**not shown here**", "not shown here", "5", f"0.0 (−{width:.1f} to +{width:.1f})",
        "1.00", f"{detectable + 0.05:.1f}",
    ]  # fmt: skip
    assert lines["SAM misses less"][1:4] == ["not measured", "", "0"]
    assert lines["SAM is as accurate"][1] == "**not shown here**"
    assert "Of 4 tests, 1 shows what the paper says (1 also after Holm), 1 shows the reverse (1 also" in text
    assert "What was tried:\n\n- SAM is more accurate: ρ of 0.02 and 0.1.\n" in text
    assert f" With a chance of 80 %, true differences would have shown of {detectable + 0.05:.1f} points in all" in text
    assert "All jobs took 10 minutes of one core, and the longest run 62 s." in text
    assert text == page.page(rows_of(VALUES, code), CLAIMS_OF_SAM)


def test_the_page_has_the_verdicts_in_front_and_the_variants_means(page, code):
    text = page.page(rows_of(VALUES, code), CLAIMS_OF_SAM)
    assert "| Chen et al. 2022 | SAM is flatter | **shown** |" in text
    assert "| Chen et al. 2022 | SAM is more accurate | not shown here |" in text
    assert "| Chen et al. 2022 | SAM misses less | not measured |" in text
    assert "| AdamW | 31.0 ± 0.7 | 110.0 ± 10.0 |" in text and "diverged, %" not in text and "| whole job" not in text
    assert "commit abc" in text and "1,000 training images, seeds 0 to 4:" in text and "## AlterNet" not in text


def test_numbers_have_the_decimals_of_their_mean_and_a_minus(page):
    assert (page.number("λ_max", 12.34), page.number("λ_max", 0.5, 12.34)) == ("12.3", "0.5")
    assert (page.number("L", -1.7619), page.number("L", -0.0001), page.number("top-1, %", 0.123)) == (
        "−1.762", "0.000", "12.3",
    )  # fmt: skip


def test_what_is_detectable_is_rounded_up():
    ratio, points = CLAIMS_OF_SAM[0], CLAIMS_OF_SAM[2]
    assert _claims._detectable(points, "top-1, %", 0.01232) == "1.3"
    assert _claims._detectable(ratio, "λ_max", 1.202) == "×1.21" and _claims._detectable(ratio, "λ_max", 1.2) == "×1.20"


def test_a_claim_that_its_own_test_shows_may_not_survive_all_others(page, code):
    clear = {"AdamW": (1.0,) * 5, "SAM": tuple(np.exp(-0.3 + 0.065 * np.array([1, -1, 0.5, -0.5, 0])))}  # t is 13
    more = (*CLAIMS_OF_SAM, *(Claim("D", "sam", f"no {i}", "miss_rate", "SAM", "AdamW", -1) for i in range(40)))
    values = {**VALUES, "noisy_loss": clear}
    few, many = (page.page(rows_of(values, code), claims) for claims in (CLAIMS_OF_SAM, more))
    name = "SAM is robust to noise"
    assert lines_of(few)[name][1:3] == ["**shown**", "shown"]
    assert lines_of(many)[name][1:3] == ["**shown**", "not shown here"]
    assert f"| {name} | **shown**, not after Holm |" in many


def test_rows_of_other_settings_are_left_out_and_images_are_apart(page, code):
    def of(value, **changes):
        return rows_of({"top1": {"AdamW": (value,) * 2, "SAM": (value,) * 2}}, code, **changes)

    text = page.page([
        *of(0.9), *of(0.4, digest="d2"), *of(0.7, data="cars"), *of(0.6, settings={**SAM.settings, "rho": 7}),
    ])  # fmt: skip
    assert "**pets**" in text and "**cars**" in text and "40.0 ± 0.0" in text and "70.0" in text
    assert "90.0" not in text and "60.0" not in text
    assert "No claim has the 5 seeds of a first look yet." in text
    assert "| paper | claim | pets | cars |" in text and "| too few seeds | too few seeds |" in text
    assert "Not measured yet." in page.page(of(0.6, settings={**SAM.settings, "rho": 7}))


def test_claims_that_both_looks_did_not_show_say_what_was_tried(page):
    judged = page.judge_all(page._newest(page.load("papers.csv", page.RESULTS)), CLAIMS)
    silent = [one.claim.text for one in judged if one.outcome.verdict == "reversed" and not one.claim.tried]
    silent += [one.claim.text for one in judged if one.outcome.verdict == "not shown here" and one.outcome.look == 2
               and not one.claim.tried]  # fmt: skip
    assert not silent


def test_what_was_tried_is_said_once_for_all_images_and_claims(page, code):
    both = {"top1": VALUES["top1"], "miss_rate": VALUES["top1"]}
    claims = [Claim("D", "sam", name, metric, "SAM", "AdamW", 1, tried="many.")
              for name, metric in (("SAM is better", "top1"), ("SAM misses", "miss_rate"))]  # fmt: skip
    text = page.page([*rows_of(both, code), *rows_of(both, code, data="cars")], claims)
    assert text.count("What was tried:") == 1
    assert text.endswith("What was tried:\n\n- SAM is better; SAM misses: many.\n")


def test_a_job_that_was_done_again_counts_once(page, code):
    again = {"cpu_seconds": {"AdamW": (40,), "whole job": (60,)}}
    text = page.page([*rows_of(VALUES, code), *rows_of(again, code)], CLAIMS_OF_SAM)
    assert "All jobs took 9 minutes of one core, and the longest run 62 s." in text


def test_without_results_the_page_promises_nothing(page):
    assert "Not measured yet." in page.page([]) and "shown |" not in page.page([])


def test_every_claim_is_of_an_experiment_that_there_is_and_of_a_metric_with_a_name(page):
    known = {(e.paper, e.name) for e in runner.EXPERIMENTS}
    assert {(c.paper, c.experiment) for c in CLAIMS} <= known == set(page.TITLES) == set(page.TEXT)
    assert all(c.metric in page.NAMES for c in CLAIMS)
    for experiment in runner.EXPERIMENTS:  # the bound
        words = " ".join(experiment.settings["common"].get("model_kwargs", experiment.settings.get("kwargs")))
        widths = [int(n) for n in words.replace("[", " ").replace("]", " ").replace(",", " ").replace("=", " ").split()
                  if n.isdecimal()]  # fmt: skip
        assert max(widths) <= 192 and pictures.TRAIN <= 1000
