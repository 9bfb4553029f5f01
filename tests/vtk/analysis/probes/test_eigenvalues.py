"""Both ends of the spectrum, against matrices whose eigenvalues are chosen."""

import pytest
import torch

from vtk.analysis.probes.eigenvalues import METHODS, top_eigenvalues
from vtk.errors import DataError, UsageError

SIZE = 60


def operator(values):
    """A symmetric matrix with these eigenvalues and small ones, and a start vector."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))[0]
    rest = torch.linspace(-0.5, 0.5, SIZE - len(values), dtype=torch.float64)
    every = torch.cat([torch.tensor(values, dtype=torch.float64), rest])
    matrix = basis * every @ basis.T
    return (lambda v: matrix @ v), torch.randn(SIZE, generator=generator, dtype=torch.float64)


def largest(values, **options):
    product, start = operator(values)
    return top_eigenvalues(product, start, max_iter=3000, tol=1e-7, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("values, algebraic, magnitude", [
    ((9.0, 7.0, 3.0, -20.0, -400.0), (9.0, 7.0), (-400.0, -20.0)),
    ((9.0, 7.0, 3.0, -8.0), (9.0, 7.0), (9.0, -8.0)),
    ((9.0, 7.0), (9.0, 7.0), (9.0, 7.0)),
    ((-3.0, -9.0), (0.5, 0.5 - 1 / 57), (-9.0, -3.0)),
], ids=["a negative outlier", "both signs", "a minimum", "hardly any curvature upwards"])  # fmt: skip
def test_the_largest_values_and_those_of_largest_magnitude_are_told_apart(method, values, algebraic, magnitude):
    found = largest(values, algebraic=2, magnitude=2, method=method)
    assert found.algebraic == pytest.approx(algebraic, rel=1e-2)
    assert found.magnitude == pytest.approx(magnitude, rel=1e-4)
    if method == "lanczos":
        assert found.converged == (True,) * 4 and found.algebraic == pytest.approx(algebraic, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_negative_definite_operator_has_a_largest_value_too(method):
    product, start = operator(())
    found = top_eigenvalues(lambda v: product(v) - 2 * v, start, method=method, max_iter=5000, tol=1e-8)
    assert found.algebraic == pytest.approx((-1.5,), rel=1e-3) and found.magnitude == pytest.approx((-2.5,), rel=1e-3)


def test_a_mixture_of_two_values_of_opposite_signs_has_not_converged():
    """Iterates of ±5 never part: their Rayleigh quotient is constant, and is no eigenvalue."""
    matrix = torch.diag(torch.tensor([5.0, -5.0, 1.0], dtype=torch.float64))
    start = torch.tensor([1.0, 0.8, 0.1], dtype=torch.float64)
    assert not all(top_eigenvalues(lambda v: matrix @ v, start, method="power").converged)
    found = top_eigenvalues(lambda v: matrix @ v, start)
    assert found.algebraic == pytest.approx((5.0,)) and all(found.converged)


def test_a_value_that_occurs_twice_is_found_once_by_lanczos_and_twice_by_power():
    """What docs and captions say of exact multiplicities; the largest is right either way."""
    values = (9.0, 9.0, 5.0, -7.0, -7.0)
    assert largest(values, algebraic=2, magnitude=3).algebraic == pytest.approx((9.0, 5.0))
    assert largest(values, algebraic=2, magnitude=3).magnitude == pytest.approx((9.0, -7.0, 5.0))
    found = largest(values, algebraic=2, magnitude=3, method="power")
    assert found.algebraic == pytest.approx((9.0, 9.0)) and found.magnitude == pytest.approx((9.0, 9.0, -7.0))
    assert "several times exactly" in str(top_eigenvalues.__doc__)


def test_the_largest_magnitude_is_never_below_lambda_max():
    """A mixture of ±10 stays at −0.2; shifted by it the iteration finds 10, which is of larger magnitude."""
    matrix = torch.diag(torch.tensor([10.0, -10.0, 1.0], dtype=torch.float64))
    start = torch.tensor([1.0, 1.02, 0.1], dtype=torch.float64)
    found = top_eigenvalues(lambda v: matrix @ v, start, method="power", max_iter=200)
    assert found.algebraic == pytest.approx((10.0,), rel=1e-2) and found.magnitude == found.algebraic


def test_small_steps_beside_a_negative_outlier_are_no_convergence():
    """Shifted by 400 all other values are nearly the same: the quotient hardly moves, far from the largest."""
    values = torch.cat([torch.tensor([-400.0]), torch.linspace(-1, -0.01, 200)])
    start = torch.randn(len(values), generator=torch.Generator().manual_seed(0))
    found = top_eigenvalues(lambda v: values * v, start, method="power")
    assert found.converged == (False, True) and found.magnitude == pytest.approx((-400.0,))
    assert top_eigenvalues(lambda v: values * v, start).algebraic == pytest.approx((-0.01,), abs=5e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_products_that_are_not_finite_are_one_line(method, value):
    values = torch.tensor([1.0, value, 2.0])
    with pytest.raises(DataError, match="a product with the Hessian is not finite") as info:
        top_eigenvalues(lambda v: values * v, torch.ones(3), method=method)
    assert "\n" not in str(info.value)


def test_a_restart_keeps_both_ends(monkeypatch):
    values = (9.0, 7.0, *(-400.0 + i for i in range(12)))
    monkeypatch.setattr("vtk.analysis.probes.eigenvalues.BASIS_BYTES", 0)
    found = largest(values, algebraic=2, magnitude=2)
    assert found.converged == (True,) * 4 and found.products > 14
    assert (*found.algebraic, *found.magnitude) == pytest.approx((9.0, 7.0, -400.0, -399.0), rel=1e-6)


@pytest.mark.parametrize("options", [{"algebraic": 0}, {"magnitude": 0}, {"algebraic": SIZE + 1}])
def test_more_values_than_there_are_are_refused(options):
    with pytest.raises(UsageError, match=r"eigenvalues of an operator on 60 numbers; give 1 to 60"):
        largest((1.0,), **options)
