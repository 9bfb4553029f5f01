"""Eigenvalues at the ends of the spectrum of a symmetric operator that is known only by its products with vectors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vtk.errors import NoResultError, UsageError

Method = Literal["lanczos", "power"]
METHODS: tuple[Method, ...] = ("lanczos", "power")
BASIS_BYTES = 2**30
"""Maximum size of the basis of ``lanczos``, which has room for twice the wanted values and 6 more vectors."""

_SMALL = 1e-6  # of the largest magnitude: a smaller error counts as converged, also of eigenvalues near 0


@dataclass(frozen=True)
class Eigenvalues:
    """Result of an eigenvalue iteration.

    Attributes:
        algebraic: the largest ones, in descending order: where the operator bends upwards most.
        magnitude: those of largest magnitude, the largest first, with signs.
        converged: of each of ``algebraic``, then of each of ``magnitude``, whether it is within the tolerance.
        products: number of products with the operator.
    """

    algebraic: tuple[float, ...]
    magnitude: tuple[float, ...]
    converged: tuple[bool, ...]
    products: int


def top_eigenvalues(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    algebraic: int = 1,
    magnitude: int = 1,
    method: Method = "lanczos",
    max_iter: int = 100,
    tol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Eigenvalues:
    """Return the largest eigenvalues, and those of largest magnitude.

    They are the same where the largest magnitude is positive, as near a minimum; elsewhere −400 has the largest
    magnitude of (9, …, −400), and 9 is the largest.

    ``lanczos`` keeps an orthonormal basis of its iterations and stops when the residual bound of every wanted value is
    below ``tol`` times it: few products, and memory of at most `BASIS_BYTES` or twice the wanted values and 6 vectors,
    whichever is more. Its vectors are all in the space that one start vector spans, which has one vector of each
    eigenvalue: one that occurs several times exactly is found once, and the next ones take the places of its copies.
    The largest is right all the same.

    ``power`` finds one value of largest magnitude after the other, each copy too, keeping iterates orthogonal to those
    found (deflation), and stops when the value changes by less than ``tol`` of itself and is no mixture of two of
    opposite signs: it keeps a vector for each value and needs many products, as PyHessian and Park and Kim (2022) and
    Chen et al. (2022) do. Once a negative value was found, it looks for the largest ones in the operator shifted by it,
    which has no negative values. All of these are close to the shift then, so that steps are small anyway: there the
    residual has to be small as well, compared with the value itself.

    Args:
        product: symmetric; maps (n,) to (n,).
        start: (n,), not zero; gives device and number format.
        algebraic: how many of the largest, 1 to n.
        magnitude: how many of the largest magnitude, 1 to n.
        method: ``lanczos`` or ``power``.
        max_iter: products at most; with ``power`` for each value.
        tol: relative tolerance.
        generator: on the CPU, for further start vectors.

    Raises:
        UsageError: an argument is out of range.
        NoResultError: a product is not finite.
    """
    for top in (algebraic, magnitude):
        if not 1 <= top <= len(start):
            raise UsageError(f"{top} eigenvalues of an operator on {len(start)} numbers; give 1 to {len(start)}")
    if max_iter < 1 or tol <= 0:
        raise UsageError(f"`max_iter` is {max_iter} and `tol` {tol}; give at least one iteration and a tolerance > 0")
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; give {' or '.join(METHODS)}")
    own = generator or torch.Generator().manual_seed(0)
    find = _lanczos if method == "lanczos" else _power

    def finite(vector: Tensor) -> Tensor:
        image = product(vector)
        if not bool(image.isfinite().all()):
            raise NoResultError(
                "a product with the Hessian is not finite: the loss or its derivatives overflow on these images; look "
                "at their values and at the model's weights"
            )
        return image

    return find(finite, start, algebraic, magnitude, max_iter, tol, own)


Value = tuple[float, bool, Tensor]
"""An eigenvalue, whether it converged, and its vector."""


def _power(
    product: Callable[[Tensor], Tensor], start: Tensor, algebraic: int, magnitude: int, max_iter: int, tol: float,
    generator: torch.Generator,
) -> Eigenvalues:  # fmt: skip
    products = 0

    def counted(vector: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return product(vector)

    def following(known: list[Value], shift: float = 0.0) -> Value:
        first = start if not products else _random_like(start, generator)
        return _iterate(counted, first, [vector for _, _, vector in known], shift, max_iter, tol)

    found: list[Value] = []
    upper: list[Value] = []
    while len(found) < magnitude or (len(upper) == len(found) < algebraic):
        found.append(following(found))
        upper = [one for one in found if one[0] >= 0]
    while len(upper) < algebraic:
        upper.append(following(upper, shift=max(-value for value, _, _ in found)))
    # where the search by magnitude did not converge, the other one may have found more
    found += [one for one in upper if one[0] > 0 and not any(one is other for other in found)]
    found.sort(key=lambda one: -abs(one[0]))
    upper.sort(key=lambda one: -one[0])
    wanted = [*upper[:algebraic], *found[:magnitude]]
    values = [value for value, _, _ in wanted]
    return Eigenvalues(
        tuple(values[:algebraic]), tuple(values[algebraic:]), tuple(settled for _, settled, _ in wanted), products
    )


def _iterate(
    product: Callable[[Tensor], Tensor], start: Tensor, known: list[Tensor], shift: float, max_iter: int, tol: float
) -> Value:
    """Iterate to the eigenvalue λ of largest |λ + shift| whose vector is orthogonal to the known ones."""
    vector = _unit(start, known)
    value, settled = 0.0, False
    for step in range(max_iter):
        image = product(vector)
        before, value = value, float(vector @ image)
        image = _orthogonal(image, known)
        if shift:
            residual = float((image - value * vector).norm())
            image = image + shift * vector
        size = float(image.norm())
        # of two values ±λ the iterates are a mixture for long, whose Rayleigh quotient is constant between them
        pure = size - abs(value + shift) <= tol**0.5 * size
        if shift:  # λ + shift of all values are alike, so that quotients change little long before the largest
            pure = residual <= tol**0.5 * max(abs(value), _SMALL * abs(shift))
        settled = step > 0 and pure and abs(value - before) <= tol * abs(value)
        following = _unit(image, known)
        if settled or not bool(following.any()):  # zero: the rest of the operator vanishes
            settled = True
            break
        vector = following
    return value, settled, vector


def _lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, algebraic: int, magnitude: int, max_iter: int, tol: float,
    generator: torch.Generator,
) -> Eigenvalues:  # fmt: skip
    """Lanczos with a full basis, restarted from its best Ritz vectors when the memory is full (thick restart)."""
    size, least = len(start), max(algebraic, magnitude)
    steps = min(max(max_iter, least), size)
    room = min(steps, max(2 * (algebraic + magnitude) + 6, BASIS_BYTES // start.nbytes), size)
    basis = start.new_empty(room, size)  # untouched pages take no memory
    basis[0] = start / start.norm()
    inner = torch.zeros(room, room, dtype=torch.float64)  # the operator on the basis
    count = 1
    for step in range(1, steps + 1):
        image = product(basis[count - 1])
        column, rest = _expand(image, basis[:count])
        inner[:count, count - 1] = inner[count - 1, :count] = column.double().cpu()
        norm = float(rest.norm())
        values, vectors = torch.linalg.eigh(inner[:count, :count])
        bounds = norm * vectors[-1].abs()
        order = values.abs().argsort(descending=True)
        upper, best = values.argsort(descending=True)[:algebraic], order[:magnitude]
        wanted = torch.cat([upper, best])
        scale = float(values.abs().max())
        # the basis spans the whole Krylov space of the start vector
        exhausted = norm <= 1e-7 * max(scale, 1e-30) or count == size
        settled = bounds[wanted] <= torch.clamp(tol * values[wanted].abs(), min=min(tol, _SMALL) * scale)
        settled |= exhausted
        if (count >= least and bool(settled.all())) or step == steps:
            break
        if exhausted:
            rest = _expand(_random_like(start, generator), basis[:count])[1]
            norm = float(rest.norm())
        if count == room:
            kept = torch.cat([upper, order[~torch.isin(order, upper)]])[: room // 2 + 1]
            _rotate(basis, vectors[:, kept].to(basis))
            count = len(kept)
            inner.zero_()
            inner[:count, :count] = torch.diag(values[kept])
        basis[count] = rest / norm
        count += 1
    return Eigenvalues(tuple(values[upper].tolist()), tuple(values[best].tolist()), tuple(settled.tolist()), step)


def _expand(vector: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return a vector's coefficients in an orthonormal basis (k, n) and the remainder."""
    column = basis @ vector
    rest = vector - column @ basis
    if float(rest.norm()) < 0.3 * float(vector.norm()):  # cancellation left rounding errors
        again = basis @ rest
        column, rest = column + again, rest - again @ basis
    return column, rest


def _rotate(basis: Tensor, vectors: Tensor, columns: int = 2**16) -> None:
    """Replace the first vectors of a basis (m, n) by combinations (m, k), a piece at a time: without a second basis."""
    for piece in basis.split(columns, dim=1):
        piece[: vectors.shape[1]] = vectors.T @ piece


def _orthogonal(vector: Tensor, basis: list[Tensor]) -> Tensor:
    for _ in range(2):  # once is not enough in floating point
        for other in basis:
            vector = vector - (vector @ other) * other
    return vector


def _unit(vector: Tensor, basis: list[Tensor]) -> Tensor:
    rest = _orthogonal(vector, basis)
    norm = rest.norm()
    return rest / norm if float(norm) > 1e-7 * float(vector.norm()) > 0 else torch.zeros_like(rest)


def _random_like(vector: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(len(vector), generator=generator).to(vector)
