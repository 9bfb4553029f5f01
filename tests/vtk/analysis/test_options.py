"""Options of single diagnostics: which they are, and what happens where none of these is measured."""

import re

import pytest

from vtk.__main__ import main
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostics import NAMES, diagnostic
from vtk.analysis.run import check_options
from vtk.errors import UsageError
from vtk.options.config import option_of

GIVEN = {
    "hessian_images": 9, "hessian_batch": 3, "hessian_method": "power", "hessian_iterations": 5, "hessian_tol": 0.5,
    "top": 1, "ntk_relu": True, "ntk_init": False, "grid": 5, "span": 2.0, "directions": "filter",
    "perturb_vectors": False, "sigma": 0.5, "draws": 4, "loss_images": "plain", "weight_decay": 0.0,
    "lesion_convs": True, "corruptions": ("fog",), "severities": (1,), "epsilons": (1.0,), "overlay_images": 2,
}  # fmt: skip


def users(option):
    return [name for name in NAMES if option in diagnostic(name).options]


def test_every_option_of_a_diagnostic_is_tried_here():
    assert set(GIVEN) == {option for name in NAMES for option in diagnostic(name).options}


@pytest.mark.parametrize("option", GIVEN)
def test_an_option_without_its_diagnostic_is_one_line_not_silence(option):
    others = tuple(name for name in NAMES if name not in users(option))
    with pytest.raises(UsageError) as info:
        check_options(AnalyzeConfig(what=others, **{option: GIVEN[option]}))
    said = str(info.value)
    off = "no-" if GIVEN[option] is False else ""
    assert said.startswith(f"`--{off}{option.replace('_', '-')}` is for {', '.join(users(option))}, ")
    assert said.endswith("add one to --what, or leave the option out") and "\n" not in said
    for name in users(option):  # also where the value is the default's
        check_options(AnalyzeConfig(what=(name,), **{option: GIVEN[option]}))
    check_options(AnalyzeConfig(what=others))


def test_a_protocols_diagnostics_count():
    check_options(AnalyzeConfig(protocol="park-kim", lesion_convs=False, hessian_method="lanczos"))
    with pytest.raises(UsageError, match="`--hessian-method` is for hessian, hessian-blocks, of which none"):
        check_options(AnalyzeConfig(protocol="wang", hessian_method="lanczos"))


def test_the_command_refuses_before_it_opens_anything(tmp_path, capsys):
    words = ["analyze", "absent", "--data", str(tmp_path), "--what", "entropy", "--lesion-convs"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "`--lesion-convs` is for lesion, which is not measured here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_names_the_diagnostics_that_take_an_option():
    for option in GIVEN:
        named = re.match(r"([a-z, -]+): ", option_of(AnalyzeConfig, option).help)
        assert named and set(named[1].split(", ")) == set(users(option)), option
