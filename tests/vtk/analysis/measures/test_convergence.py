"""Which Hessian eigenvalues converged, and what those are that did not."""

import pytest

from tests.vtk.analysis._models import images, tiny_vit
from vtk.analysis import hessian_max, hessian_spectrum
from vtk.analysis.probes.eigenvalues import Eigenvalues


@pytest.fixture(scope="module")
def saddle():
    """A confidently wrong model: the eigenvalue of largest magnitude is negative."""
    model = tiny_vit(1)
    x = images(12)[0][0]
    return model, (x, model(x).argmin(dim=1))


def test_what_has_not_converged_is_told_apart_and_is_a_lower_bound(saddle):
    model, batch = saddle
    whole = hessian_max(model, [batch], tol=1e-8)
    assert whole.lambda_max_converged == whole.magnitude_converged == {"whole": True} and whole.method == "lanczos"
    assert whole.magnitude < -whole.value < 0
    options = {"method": "power", "max_iter": 6, "tol": 1e-9}
    found = hessian_max(model, [batch], **options)
    assert found.lambda_max_converged == found.magnitude_converged == found.converged == {"whole": False}
    assert found.value <= whole.value and abs(found.magnitude) <= -whole.magnitude
    assert {"lambda_max_converged", "magnitude_converged", "method"} <= set(found.to_dict())
    one = hessian_spectrum(model, [batch], top=1, **options)
    assert one.lambda_max_converged == (False,) and one.lambda_max[0] <= whole.value and one.method == "power"


def test_the_two_flags_are_those_of_the_two_values(monkeypatch):
    one = Eigenvalues((9.0, 8.0), (-400.0,), (False, True, True), 5)  # found downwards, not upwards
    monkeypatch.setattr("vtk.analysis.measures.hessian.top_eigenvalues", lambda *args, **options: one)
    found = hessian_max(tiny_vit(), images(2), top=2)
    assert (found.lambda_max_converged, found.magnitude_converged) == ({"whole": False}, {"whole": True})
    two = Eigenvalues((9.0,), (-400.0, -7.0), (False, True, True), 5)
    monkeypatch.setattr("vtk.analysis.measures.hessian.top_eigenvalues", lambda *args, **options: two)
    spectrum = hessian_spectrum(tiny_vit(), images(2), top=2)
    assert spectrum.lambda_max_converged == (False,) and spectrum.converged == 1.0
