"""Eigenvalues of largest magnitude of a symmetric operator that is known only by its products with vectors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vtk.errors import UsageError

Method = Literal["lanczos", "power"]
METHODS: tuple[Method, ...] = ("lanczos", "power")
BASIS_BYTES = 2**30
"""Maximum size of the basis of ``lanczos``, which has at least 2·top + 6 vectors."""


@dataclass(frozen=True)
class Eigenvalues:
    """Result of an eigenvalue iteration.

    Attributes:
        values: largest magnitude first, signs kept.
        converged: of each, whether it converged within the tolerance.
        products: number of products with the operator.
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

    ``lanczos`` keeps an orthonormal basis of its iterations and stops when the residual bound of every wanted value is
    below ``tol`` times it: few products, and memory of at most `BASIS_BYTES` or 2·top + 6 vectors, whichever is more.
    ``power`` finds one after the other, keeping iterates orthogonal to those found (deflation), and stops when the
    value changes by less than ``tol`` of itself: it keeps ``top`` + 2 vectors and needs many products, as PyHessian and
    Park and Kim (2022) and Chen et al. (2022) do.

    Args:
        product: symmetric; maps (n,) to (n,).
        start: (n,), not zero; gives device and number format.
        top: number of eigenvalues, at most n.
        method: ``lanczos`` or ``power``.
        max_iter: products at most; with ``power`` for each value.
        tol: relative tolerance.
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
    vectors: list[Tensor] = []
    values, converged, products = [], [], 0
    for i in range(top):
        vector = _unit(start if i == 0 else _random_like(start, generator), vectors)
        value, settled = 0.0, False
        for step in range(max_iter):
            image = product(vector)
            products += 1
            before, value = value, float(vector @ image)
            settled = step > 0 and abs(value - before) <= tol * abs(value)
            following = _unit(image, vectors)
            if settled or not bool(following.any()):  # zero: the rest of the operator vanishes
                settled = True
                break
            vector = following
        vectors.append(vector)
        values.append(value)
        converged.append(settled)
    order = sorted(range(top), key=lambda i: -abs(values[i]))
    return Eigenvalues(tuple(values[i] for i in order), tuple(converged[i] for i in order), products)


def _lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, top: int, max_iter: int, tol: float, generator: torch.Generator
) -> Eigenvalues:
    """Lanczos with a full basis, restarted from its best Ritz vectors when the memory is full (thick restart)."""
    size = len(start)
    steps = min(max(max_iter, top), size)
    room = min(steps, max(2 * top + 6, BASIS_BYTES // start.nbytes), size)
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
        best = order[:top]
        scale = max(float(values.abs().max()), 1e-30)
        # the basis spans the whole Krylov space of the start vector
        exhausted = norm <= 1e-7 * scale or count == size
        if count >= top and (exhausted or bool((bounds[best] <= tol * values[best].abs()).all())):
            break
        if step == steps:
            break
        if exhausted:
            rest = _expand(_random_like(start, generator), basis[:count])[1]
            norm = float(rest.norm())
        if count == room:
            kept = order[: room // 2 + 1]
            _rotate(basis, vectors[:, kept].to(basis))
            count = len(kept)
            inner.zero_()
            inner[:count, :count] = torch.diag(values[kept])
        basis[count] = rest / norm
        count += 1
    settled = bounds[best] <= torch.clamp(tol * values[best].abs(), min=1e-6 * float(values.abs().max()))
    return Eigenvalues(tuple(values[best].tolist()), tuple(settled.tolist()), step)


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
