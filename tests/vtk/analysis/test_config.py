"""Options of ``vtk analyze``: what they allow, and that every name has its diagnostic."""

from pathlib import Path

import pytest

from vtk.analysis.config import AnalyzeCommand, AnalyzeConfig
from vtk.analysis.diagnostic_names import CORRUPTIONS
from vtk.analysis.diagnostics import GROUPS, NAMES, diagnostic
from vtk.analysis.measures.pixel_corruptions import KINDS
from vtk.errors import UsageError


def test_names_are_chosen_once_in_the_reports_order() -> None:
    chosen = AnalyzeConfig(what=("hessian", "attention", "entropy", "tokens")).chosen()
    assert chosen == (*GROUPS["attention"], *GROUPS["tokens"], "hessian")
    assert AnalyzeConfig().chosen() == NAMES and len(set(NAMES)) == len(NAMES)
    config = AnalyzeConfig(what=("hessian", "attention"))
    assert config.named == {"hessian"}  # a group's members may be refused without an error code


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": ""}, "no model was given; give a pack"),
        ({"compare": ("a", "b")}, "names both models; leave out m"),
        ({"what": ("entropie",)}, "--what` is entropie; allowed is all, attention"),
        ({"what": ()}, "--what` is empty; allowed is all, attention"),
        ({"max_images": 0}, "--max-images` is 0"),
        ({"grid": 4}, "--grid` is 4; allowed is an odd number"),
        ({"draws": 3}, "--draws` is 3"),
        ({"sigma": float("nan")}, "--sigma` is nan"),
        ({"span": 0.0}, "--span` is 0.0"),
        ({"weight_decay": -1.0}, "--weight-decay` is -1.0"),
        ({"severities": (0,)}, "--severities` is 0; allowed is from 1 to 5"),
        ({"corruptions": ("fogg",)}, "--corruptions` is fogg; allowed is gaussian-noise"),
        ({"epsilons": ()}, "--epsilons` is empty; allowed is at least one value"),
        ({"resume": True, "overwrite": True}, "give one of them"),
        ({"threads": 0}, "--threads` is 0"),
        ({"workers": -1}, "--workers` is -1"),
        ({"seed": -1}, "--seed` is -1"),
        ({"num_classes": 0}, "--num-classes` is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        AnalyzeCommand(**{"model": "m", "data": Path("d"), **changes})
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_its_diagnostic(name: str) -> None:
    found = diagnostic(name)
    assert found.name == name
    assert all(text.strip() == text and text for text in (found.title, found.explains))
    assert set(found.options) <= set(AnalyzeConfig.__dataclass_fields__)


def test_every_corruption_can_be_named() -> None:
    assert tuple(KINDS) == CORRUPTIONS
