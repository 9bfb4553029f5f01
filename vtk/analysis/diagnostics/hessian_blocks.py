"""``hessian-blocks``: largest curvature of the model, its parts and its blocks (Chen et al. 2022, Table 4)."""

from collections.abc import Mapping, Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.curvature import LOWER_BOUND, OPTIONS, iteration, log_axis, not_converged
from vtk.analysis.diagnostics.measurement import as_chen, not_as_chen, on_images, sentence
from vtk.analysis.measures.hessian import hessian_max
from vtk.analysis.probes.parameter_groups import parameter_blocks

_NAMES = {"msa": "MSA", "mlp": "MLP", "token mlp": "token MLP"}
_WIDE = 30.0  # ratio of values from which the axis is logarithmic, so that short bars are visible
_SHARP = 100.0  # Chen et al. 2022, Table 1: λ_max is 21 to 42 after training with SAM, 180 to 1,644 without
_DEEPER = 2.0  # times larger; below that, shallow and deep blocks are called equally sharp


def _measure(context: Context) -> dict[str, Any]:
    batches, groups = context.loss_batches(context.settings.hessian_batch), parameter_blocks(context.model)
    return hessian_max(context.model, batches, groups=groups, **iteration(context)).to_dict()


def lambda_max(result: Result) -> dict[str, float | None]:
    """Return λ_max of each group; None if it is not known.

    Results of version 0.1 have the eigenvalue of largest magnitude only, which is λ_max where it is positive.
    """
    if "lambda_max" in result:
        return dict(result["lambda_max"])
    return {name: value if value is not None and value >= 0 else None for name, value in largest(result).items()}


def largest(result: Result) -> dict[str, float | None]:
    """Return the eigenvalue of largest magnitude of each group, with its sign."""
    if "lambda_largest_magnitude" in result:
        return dict(result["lambda_largest_magnitude"])
    return {name: eigenvalues[0] for name, eigenvalues in result["values"].items()}


def _draw(runs: Sequence[Run]) -> list[Picture]:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(name for run in runs for name in run.result["values"]))
    figure, (axes,) = figures.new()
    width = 0.8 / len(runs)
    handles: list[Any] = []
    sizes: list[float] = []
    any_negative = False
    for number, (colour, run) in enumerate(zip(figures.COLOURS, runs, strict=False)):
        upwards = {name: value for name, value in lambda_max(run.result).items() if value is not None and value > 0}
        downwards = {name: -value for name, value in largest(run.result).items() if value is not None and value < 0}
        at = {name: names.index(name) + (number - (len(runs) - 1) / 2) * width for name in names}
        for values, style in ((downwards, {"facecolor": "white", "edgecolor": colour, "hatch": "////"}),
                              (upwards, {"color": colour})):  # fmt: skip
            axes.bar([at[name] for name in values], list(values.values()), width, **style)
            sizes += values.values()
        any_negative = any_negative or bool(downwards)
        handles.append(Patch(color=colour, label=figures.label(run.label)))
    if any_negative:
        handles.append(Patch(facecolor="white", edgecolor="#555555", hatch="////", label="negative, and larger"))
    if sizes and max(sizes) > _WIDE * min(sizes):
        log_axis(axes)
    axes.set_xticks(range(len(names)), [_NAMES.get(name, name) for name in names], rotation=60, ha="right", fontsize=9)
    figures.finish(axes, x="", y="largest curvature λ_max")
    axes.legend(handles=handles, frameon=False, fontsize=9)
    caption = (
        "Largest Hessian eigenvalue, of all parameters and of each group with the others fixed (a diagonal block)."
        + (" Hatched: the size of a negative eigenvalue that is larger in magnitude." if any_negative else "")
        + f" The loss is the mean over {runs[0].result['images']} images."
    )
    return [Picture("hessian-blocks", figure, caption)]


def _read(result: Result) -> list[str]:
    values, extreme = lambda_max(result), largest(result)
    whole = values["whole"]
    known = {name: value for name, value in values.items() if value is not None}
    parts = {name: value for name, value in known.items() if name != "whole"}
    sharp = as_chen(result) and whole is not None and whole >= _SHARP
    sentences = [
        "The largest curvature of the loss (λ_max) is not known from this result: analyse the model again."
        if whole is None
        else f"The largest curvature of the loss (λ_max) is {whole:.3g}."
    ]
    if sharp:
        sentences.append(
            f"Over {_SHARP:g} the minimum is sharp: in Chen et al. (2022) models trained with SAM have 21 to 42, "
            "others 180 to 1,644, all on ImageNet. Try `vtk finetune … --sam 0.1`."
        )
    sentences.append(sentence(result))
    if not as_chen(result):
        sentences.append(not_as_chen(result))
    sentences += _downwards(extreme)
    if parts:
        sharpest = max(parts, key=lambda name: parts[name])
        sentences.append(
            f"Of these parts, which leave out the head, the largest curvature is {_NAMES.get(sharpest, sharpest)} "
            f"({parts[sharpest]:.3g})."
        )
    sentences += _by_depth(
        [value for name, value in values.items() if name.startswith("block ")], sharp, as_chen(result)
    )
    return sentences + _loose(result)


def _loose(result: Result) -> list[str]:
    """Return sentences on the groups of which an eigenvalue did not converge, λ_max first."""
    found = {}
    for which, what, then in (
        ("lambda_max", "λ_max", "a lower bound"),
        ("magnitude", "the eigenvalue of largest magnitude", "a lower bound of its size"),
    ):
        if names := [_NAMES.get(name, name) for name, ok in settled(result, which).items() if not ok]:
            found[f"{what} of {', '.join(names)}"] = then
    return not_converged(result, found)


def settled(result: Result, which: str = "lambda_max") -> dict[str, bool]:
    """Return of each group whether λ_max, or the eigenvalue of largest ``magnitude``, converged.

    Results of version 0.1 say it of the latter only, which is λ_max where it is positive.
    """
    return dict(result.get(f"{which}_converged") or result["converged"])


def _downwards(extreme: Mapping[str, float | None]) -> list[str]:
    """Return sentences on the groups whose eigenvalue of largest magnitude is negative."""
    negative = {name: value for name, value in extreme.items() if value is not None and value < 0}
    if not negative:
        return []
    listed = ", ".join(f"{_NAMES.get(name, name)} ({value:.3g})" for name, value in negative.items())
    return [
        "The loss bends downwards more than upwards, so it is not convex there and the model is not at a minimum of "
        f"it; eigenvalue of largest magnitude: {listed}."
    ]


def _by_depth(blocks: Sequence[float | None], sharp: bool, comparable: bool) -> list[str]:
    known = [value for value in blocks if value is not None]
    if len(known) < len(blocks) or len(known) < 4:
        return []
    quarter = max(len(known) // 4, 1)
    first, last = sum(known[:quarter]) / quarter, sum(known[-quarter:]) / quarter
    if first > max(_DEEPER * last, 0.0):
        advice = " Give them a lower learning rate: `vtk finetune … --layer-decay 0.75`." if sharp else ""
        found = ", as Chen et al. (2022) find" if comparable else ""
        return [f"Shallow blocks are sharper than deep ones{found}: curvature accumulates towards the input.{advice}"]
    if last > max(_DEEPER * first, 0.0):
        return [f"Deep blocks are sharper than shallow ones{', unlike in Chen et al. (2022)' if comparable else ''}."]
    return ["Shallow and deep blocks are about as sharp."]


def _numbers(result: Result) -> dict[str, float]:
    values, whole, end = lambda_max(result), largest(result)["whole"], on_images(result)
    sure, sure_of_size = settled(result), settled(result, "magnitude")
    numbers = {
        f"λ_max of {_NAMES.get(name, name)}{'' if sure.get(name, True) else LOWER_BOUND}{end}": value
        for name in ("whole", "embedding", "msa", "token mlp", "mlp")
        if (value := values.get(name)) is not None
    }
    if whole is None:
        return numbers
    bound = "" if sure_of_size.get("whole", True) else ", not converged"
    return {**numbers, f"λ of largest magnitude, with its sign{bound}{end}": whole}


DIAGNOSTIC = Diagnostic(
    name="hessian-blocks",
    title="Curvature by part",
    source="Chen et al. 2022 (When Vision Transformers Outperform ResNets), Table 4 and Appendix F",
    explains=(
        "The largest curvature of the loss over all images at once, for the whole model and for each part with the "
        "others fixed. The weights of the part with the largest value are the most sensitive."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=OPTIONS,
    needs=frozenset({"labels"}),
)
