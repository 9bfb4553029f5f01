"""Measures that share their keywords refuse unknown ones and the lack of required ones, as Python does."""

import pytest
from torch import nn

from vtk.analysis.measures.attacks import attack_accuracy
from vtk.analysis.measures.corruptions import corruption_accuracy
from vtk.analysis.measures.frequency_noise import frequency_noise
from vtk.analysis.measures.hessian import hessian_max, hessian_spectrum
from vtk.analysis.measures.landscape import loss_landscape
from vtk.analysis.measures.noise import noise_accuracy
from vtk.analysis.measures.occlusion import occlusion_accuracy

ACCURACIES = (attack_accuracy, corruption_accuracy, frequency_noise, noise_accuracy, occlusion_accuracy)
STEPS = (hessian_max, hessian_spectrum, loss_landscape)


@pytest.mark.parametrize("measure", [*ACCURACIES, *STEPS])
def test_an_unknown_keyword_is_refused(measure):
    with pytest.raises(TypeError, match=rf"{measure.__name__}\(\) got an unexpected keyword argument 'show_progres'"):
        measure(nn.Identity(), [], spec=None, show_progres=True) if measure in ACCURACIES else measure(
            nn.Identity(), [], show_progres=True
        )


@pytest.mark.parametrize("measure", ACCURACIES)
def test_the_models_input_is_required(measure):
    with pytest.raises(TypeError, match=rf"{measure.__name__}\(\) missing required keyword-only argument: 'spec'"):
        measure(nn.Identity(), [])
