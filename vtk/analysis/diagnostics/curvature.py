"""Gives diagnostics of the Hessian their common options and iteration, and names values that did not converge."""

from collections.abc import Collection, Mapping
from typing import Any

from vtk.analysis.diagnostics.base import Context, Result

OPTIONS = (
    "hessian_images", "hessian_batch", "hessian_method", "hessian_iterations", "hessian_tol", "loss_images",
    "weight_decay",
)  # fmt: skip
"""Options that change every eigenvalue."""
LOWER_BOUND = ", not converged: a lower bound"
"""End of the name of a number that did not converge: it shares no row with others."""


def iteration(context: Context) -> dict[str, Any]:
    """Return the keywords by which a diagnostic's settings choose images, loss and iteration."""
    settings = context.settings
    return {
        "method": settings.hessian_method,
        "max_iter": settings.hessian_iterations,
        "tol": settings.hessian_tol,
        **context.loss_options(context.curvature_images),
        **context.step_options(),
    }


def not_converged(result: Result, found: Mapping[str, str]) -> list[str]:
    """Return a sentence on eigenvalues that did not converge, and what helps; none if all did.

    Args:
        result: of a diagnostic of the Hessian.
        found: what their numbers are, by words for the eigenvalues.
    """
    if not found:
        return []
    advice = "give more `--hessian-iterations`"
    if result.get("method") != "lanczos":  # power iteration hardly moves beside an outlier of the other sign
        advice += ", or `--hessian-method lanczos`, which needs far fewer"
    those = ", and ".join(f"{what} ({then})" for what, then in found.items())
    return [f"Not converged: {those}; {advice}."]


def mean_or_none(values: Collection[float | None]) -> float | None:
    """Return the mean; None if there are none, or one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def log_axis(axes: Any) -> None:
    """Make the y axis logarithmic, with ticks such as 0.5 and 20 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
