"""The eigenvalues of largest magnitude of a symmetric operator that is only known by its products with vectors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vtk.errors import UsageError

Method = Literal["lanczos", "power"]
METHODS: tuple[Method, ...] = ("lanczos", "power")


@dataclass(frozen=True)
class Eigenvalues:
    """What an iteration found.

    Attributes:
        values: largest magnitude first, signs kept.
        converged: of each, whether it settled within the tolerance before the iterations ran out.
        products: how often the operator was applied.
    """

    values: tuple[float, ...]
    converged: tuple[bool, ...]
    products: int


def top_eigenvalues(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    top: int = 1,
    *,
    method: Method = "lanczos",
    max_iter: int = 100,
    tol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Eigenvalues:
    """Return the eigenvalues of largest magnitude.

    ``lanczos`` keeps an orthonormal basis of all iterations (n numbers each) and stops when the residual bound of every
    wanted value is below ``tol`` times it: few products, much memory. ``power`` finds one after the other, keeping
    iterates orthogonal to those found (deflation), and stops when the value changes by less than ``tol`` of itself: it
    keeps ``top`` + 2 vectors and needs many products, as PyHessian and papers C and D do it.

    Args:
        product: symmetric; maps (n,) to (n,).
        start: (n,), not zero; gives device and number format.
        top: how many, at most n.
        method: ``lanczos`` or ``power``.
        max_iter: products at most; with ``power`` for each value.
        tol: relative.
        generator: on the CPU, for further start vectors.

    Raises:
        UsageError: an argument is out of range.
    """
    if not 1 <= top <= len(start):
        raise UsageError(f"{top} eigenvalues of an operator on {len(start)} numbers; give 1 to {len(start)}")
    if max_iter < 1 or tol <= 0:
        raise UsageError(f"`max_iter` is {max_iter} and `tol` {tol}; give at least one iteration and a tolerance > 0")
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; give {' or '.join(METHODS)}")
    own = generator or torch.Generator().manual_seed(0)
    find = _lanczos if method == "lanczos" else _power
    return find(product, start, top, max_iter, tol, own)


def _power(
    product: Callable[[Tensor], Tensor], start: Tensor, top: int, max_iter: int, tol: float, generator: torch.Generator
) -> Eigenvalues:
    found: list[Tensor] = []
    values, converged, products = [], [], 0
    for i in range(top):
        vector = _unit(start if i == 0 else _random_like(start, generator), found)
        value, settled = 0.0, False
        for step in range(max_iter):
            image = product(vector)
            products += 1
            before, value = value, float(vector @ image)
            settled = step > 0 and abs(value - before) <= tol * abs(value)
            following = _unit(image, found)
            if settled or not bool(following.any()):  # zero: the rest of the operator vanishes
                settled = True
                break
            vector = following
        found.append(vector)
        values.append(value)
        converged.append(settled)
    order = sorted(range(top), key=lambda i: -abs(values[i]))
    return Eigenvalues(tuple(values[i] for i in order), tuple(converged[i] for i in order), products)


def _lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, top: int, max_iter: int, tol: float, generator: torch.Generator
) -> Eigenvalues:
    size = len(start)
    steps = min(max(max_iter, top), size)
    basis: list[Tensor] = [_unit(start, [])]
    diagonal: list[float] = []
    beside: list[float] = []
    values, bounds = torch.empty(0), torch.empty(0)
    for step in range(steps):
        image = product(basis[-1])
        diagonal.append(float(basis[-1] @ image))
        rest = _orthogonal(image, basis)
        norm = float(rest.norm())
        values, last = _ritz(diagonal, beside)
        scale = max(float(values.abs().max()), 1e-30)
        bounds = norm * last.abs()
        best = values.abs().argsort(descending=True)[:top]
        # numerically nothing is left: the basis spans all that the start vector reaches
        exhausted = norm <= 1e-7 * scale or step + 1 == size
        if len(values) >= top and (exhausted or bool((bounds[best] <= tol * values[best].abs()).all())):
            break
        if exhausted:
            rest, norm = _orthogonal(_random_like(start, generator), basis), 0.0
            beside.append(0.0)
            basis.append(rest / rest.norm())
        else:
            beside.append(norm)
            basis.append(rest / norm)
    best = values.abs().argsort(descending=True)[:top]
    settled = bounds[best] <= torch.clamp(tol * values[best].abs(), min=1e-6 * float(values.abs().max()))
    return Eigenvalues(tuple(values[best].tolist()), tuple(settled.tolist()), len(diagonal))


def _ritz(diagonal: list[float], beside: list[float]) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of the tridiagonal matrix and the last component of each eigenvector."""
    size = len(diagonal)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(beside[: size - 1], dtype=torch.float64)
    matrix += torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors[-1]


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
