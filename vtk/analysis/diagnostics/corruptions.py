"""``corruptions``: accuracy under common corruptions, by kind and severity."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics import robustness_curves as robustness
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.accuracy import margin
from vtk.analysis.measures.corruptions import corruption_accuracy

_MOST = 256  # images: each is used once per kind and severity, 39 times by default
_STYLES = {"noise": "s--", "blur": "^-.", "weather": "D:", "digital": "v--"}
_WORST = 3


def _measure(context: Context) -> dict[str, Any]:
    kinds, severities = context.config.corruptions, context.config.severities
    return robustness.measure(context, corruption_accuracy, "corruptions", _MOST, kinds=kinds, severities=severities)


def _draw(runs: Sequence[Run]) -> list[Picture]:
    return [_by_kind(runs), _by_severity(runs)]


def _by_kind(runs: Sequence[Run]) -> Picture:
    shown = {curve["name"]: curve for curve in runs[0].result["kinds"]}
    names = [name for name in shown if all(name in _named(run.result) for run in runs)]
    figure, (axes,) = figures.new(height=1.1 + 0.3 * max(len(names), 3))
    for number, (colour, run) in enumerate(zip(figures.COLOURS, runs, strict=False)):
        shift = (number - (len(runs) - 1) / 2) * 0.3
        for place, name in enumerate(names):
            severities, accuracies = robustness.points(_named(run.result)[name])
            axes.plot(accuracies, [place + shift] * len(accuracies), color=colour, linewidth=1, alpha=0.5)
            for severity, accuracy in zip(severities, accuracies, strict=True):
                axes.plot(accuracy, place + shift, "o", color=colour, markersize=2.5 + severity, alpha=0.8,
                          markeredgewidth=0)  # fmt: skip
        axes.plot([], [], "o", color=colour, label=figures.label(run.label))
        axes.axvline(100 * run.result["clean"], color=colour, linestyle=":", linewidth=1)
    axes.axvline(100 / max(run.result["classes"] for run in runs), color="#999999", linewidth=1)
    axes.set_yticks(range(len(names)), [_shown(name) for name in names])
    axes.set_xlim(0, 102)
    axes.invert_yaxis()
    figures.finish(axes, x="accuracy, %", y="")
    if len(runs) > 1:  # the points are everywhere
        figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    strengths = ", ".join(f"{severity:g}" for severity in runs[0].result["kinds"][0]["strengths"])
    caption = (
        f"Accuracy by kind of corruption at severities {strengths}; larger points are more severe. Dotted: clean "
        "accuracy. Grey: chance."
    )
    return Picture("corruptions", figure, caption)


def _by_severity(runs: Sequence[Run]) -> Picture:
    figure, (axes,) = figures.new(height=robustness.figure_height(runs))
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        severities = run.result["kinds"][0]["strengths"]
        for group, curves in _grouped(run.result).items():
            label = f"{group}" if run is runs[0] else None
            axes.plot(severities, _means(curves), _STYLES[group], color=colour, markersize=4, linewidth=1, alpha=0.7,
                      label=label)  # fmt: skip
        label = f"{figures.label(run.label)}: mean of all" if len(runs) > 1 else "mean of all"
        axes.plot(severities, _means(run.result["kinds"]), "o-", color=colour, linewidth=2.5, label=label)
    robustness.clean_lines(axes, runs)
    axes.set_xticks(runs[0].result["kinds"][0]["strengths"])
    figures.finish(axes, x="severity", y="accuracy, %", legend=True)
    caption = "Mean accuracy over the kinds of each group, and over all, by severity. Dotted: clean accuracy."
    return Picture("corruptions-severity", figure, caption)


def _shown(name: str) -> str:
    return name.replace("-", " ").replace("gaussian", "Gaussian").replace("jpeg", "JPEG")


def _named(result: Result) -> dict[str, Any]:
    return {curve["name"]: curve for curve in result["kinds"]}


def _grouped(result: Result) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for group, curve in zip(result["groups"], result["kinds"], strict=True):
        groups.setdefault(group, []).append(curve)
    return groups


def _means(curves: Sequence[Result]) -> list[float]:
    """Return by severity the mean accuracy of curves, in per cent."""
    return [100 * sum(column) / len(column) for column in zip(*(curve["accuracies"] for curve in curves), strict=True)]


def _read(result: Result) -> list[str]:
    if nothing := robustness.nothing_to_lose(result):
        return [nothing]
    order = sorted(result["kinds"], key=robustness.mean)
    worst = ", ".join(f"{_shown(curve['name'])} ({100 * robustness.mean(curve):.1f} %)" for curve in order[:_WORST])
    sentences = [
        robustness.certainty(result),
        f"The mean accuracy over kinds and severities is {100 * result['mean']:.1f} %, {100 * result['relative']:.0f} "
        f"% of the clean accuracy. The worst kinds are {worst}.",
    ]
    groups = {group: sum(_means(curves)) / len(_means(curves)) for group, curves in _grouped(result).items()}
    low, high = min(groups, key=groups.__getitem__), max(groups, key=groups.__getitem__)
    if groups[high] - groups[low] > 100 * margin(result["images"]):
        sentences.append(
            f"Of the groups, {low} hurts most (accuracy {groups[low]:.1f} %) and {high} least ({groups[high]:.1f} %)."
        )
    if groups[low] < 100 * (result["clean"] - margin(result["images"])):
        sentences.append(
            "In Chen et al. (2022) sharpness-aware training (`vtk finetune … --sam auto`) raises the accuracy on "
            "ImageNet-C. Also try to train on similar images: `--color-jitter 0.4` for light and contrast, "
            "`--auto-augment rand-m9-mstd0.5-inc1` for more."
        )
    sentences.append(
        "The corruptions follow the formulas of Hendrycks and Dietterich but are not the images of ImageNet-C: compare "
        "these numbers with other models measured here, not with published ones."
    )
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    numbers = {"clean accuracy, %": 100 * result["clean"], "mean accuracy, corrupted, %": 100 * result["mean"]}
    if result["relative"] is not None:
        numbers["mean as a share of clean, %"] = 100 * result["relative"]
    for curve in result["kinds"]:
        numbers[f"accuracy, {_shown(curve['name'])}, %"] = 100 * robustness.mean(curve)
    return numbers


DIAGNOSTIC = Diagnostic(
    name="corruptions",
    title="Common corruptions",
    source=(
        "Hendrycks and Dietterich (2019), in Park and Kim 2022 (Figure E.1) and Chen et al. 2022 (Table 1) as "
        "ImageNet-C"
    ),
    explains="Images are corrupted as by cameras, weather and file formats, at increasing severity. "
    f"Measured on the first {_MOST} images, because each is used once per kind and severity.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("corruptions", "severities"),
    needs=frozenset({"labels", "one-label"}),
)
