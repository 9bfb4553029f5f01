"""Runs diagnostics one after another, saves each result at once, and takes up the results of an interrupted run."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil

from vtk import console
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostics import NAMES, diagnostic
from vtk.analysis.diagnostics.base import Context, Diagnostic, Run
from vtk.analysis.protocols import OPTIONS, TRAINING
from vtk.analysis.result_files import RESULTS, Analysis, earlier_result, finite
from vtk.errors import NoResultError, UsageError
from vtk.formats import write_json
from vtk.options.config import flag_of

_COMMON = ("seed", "batch_size", "split")


def check_options(config: AnalyzeConfig) -> None:
    """Refuse options of diagnostics of which none is measured: they would change nothing.

    Raises:
        UsageError: names the option and its diagnostics.
    """
    chosen = config.chosen()
    for option in fields(AnalyzeConfig):
        value = getattr(config, option.name)
        users = [name for name in NAMES if option.name in diagnostic(name).options]
        if value is None or value == option.default or not users or {*users} & {*chosen}:
            continue
        flag = flag_of(AnalyzeConfig, option.name)
        flag = flag.replace("--", "--no-", 1) if value is False else flag
        those = "which is not" if len(users) == 1 else "of which none is"
        raise UsageError(
            f"`{flag}` is for {', '.join(users)}, {those} measured here; add one to --what, or leave the option out"
        )


def run_diagnostics(
    context_of: Callable[[str], Context],
    names: Sequence[str],
    out: Path,
    *,
    label: str,
    identity: Mapping[str, Any],
    facts: Mapping[str, Any],
    main: bool = True,
    work: Path | None = None,
) -> Analysis:
    """Run diagnostics; write ``out/results/NAME.json`` after each and ``out/analysis.json`` at the end.

    Args:
        context_of: from a diagnostic's name to the model and the images that it takes.
        names: of diagnostics, in order.
        out: folder of the report; results in it with the same ``identity`` are reused.
        label: the model's name.
        identity: what the results depend on beside options and images, as JSON values: model, device.
        facts: for the report.
        main: whether this process writes; others measure with it.
        work: folder that gets ``NAME.json`` in place of ``out``, where `write_files` makes files of a report of them
            later.

    Returns:
        The analysis; diagnostics that do not apply are in ``refused``, with the reason.
    """
    options: dict[str, Any] = {}
    analysis = Analysis(label, facts={**facts, "options": options})
    (folder := work or out / RESULTS).mkdir(parents=True, exist_ok=True)
    peak = 0
    for number, name in enumerate(names, start=1):
        one = diagnostic(name)
        context = context_of(name)
        options[name] = {o: plain(_option(context, o)) for o in (*_COMMON, *one.options)}
        of = {**identity, "images": context.digest, "options": options[name]}
        file = folder / f"{name}.json"
        kept = earlier_result(file, of)
        if "result" not in kept and folder != out / RESULTS:
            kept = earlier_result(out / RESULTS / file.name, of) or kept
        if "result" not in kept:
            if main:
                console.say(f"{number}/{len(names)} {one.title}")
            reason = _unmet(one, context)
            if reason is None:
                try:
                    kept = _measured(one, context, file, of, kept.get("partial", {}), main)
                except (UsageError, NoResultError) as error:
                    reason = str(error)
            if reason is not None:
                analysis.refused[name] = reason
                if main:
                    console.warn(f"{name}: {reason}")
                continue
        analysis.results[name], analysis.seconds[name] = kept["result"], kept["seconds"]
        peak = max(peak, kept["peak_memory_bytes"])
    analysis = replace(analysis, peak_memory_bytes=peak)
    if main and work is None:
        write_json(out / "analysis.json", analysis.to_dict())
    return analysis


def _measured(
    one: Diagnostic, context: Context, file: Path, identity: Mapping[str, Any], saved: Mapping[str, Any], main: bool
) -> dict[str, Any]:
    begun = time.monotonic()
    before = float(saved.get("seconds", 0.0))
    values = dict(saved.get("values", {}))

    def save(partial: dict[str, Any]) -> None:
        if main:
            spent = before + time.monotonic() - begun
            write_json(file, {"identity": dict(identity), "partial": {"values": finite(partial), "seconds": spent}})

    result = finite(one.measure(replace(context, saved=values, save=save)))
    if one.name in TRAINING:
        result["measurement"] = context.measurement(one.options)
    kept = {
        "result": result,
        "seconds": before + time.monotonic() - begun,
        "peak_memory_bytes": _peak_memory(),
    }
    if main:
        write_json(file, {"identity": dict(identity), **kept})
    return kept


def _unmet(one: Diagnostic, context: Context) -> str | None:
    if one.needs and context.classes is None:
        return "it needs labels of the model's classes, and the folder has other classes; fine-tune first"
    if "one-label" in one.needs and context.multi_label:
        return "it needs one label per image, and this model predicts several"
    return None


def _option(context: Context, name: str) -> Any:
    """Return an option as the diagnostic uses it."""
    return getattr(context.settings if name in OPTIONS else context.config, name)


def plain(value: Any) -> Any:
    """Return an option as its JSON value."""
    return list(value) if isinstance(value, tuple) else value


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return int(psutil.Process().memory_info().peak_wset)  # type: ignore[attr-defined]
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def draw(analyses: Sequence[Analysis], out: Path) -> dict[str, list[tuple[str, str, bytes]]]:
    """Draw every diagnostic that has results, as ``out/figures/NAME.png`` and ``.svg``.

    Returns:
        By diagnostic: name, caption and PNG of each picture.
    """
    from vtk.analysis import figures

    (out / "figures").mkdir(exist_ok=True)
    drawn: dict[str, list[tuple[str, str, bytes]]] = {}
    for name in NAMES:
        runs = [Run(one.label, one.results[name]) for one in analyses if name in one.results]
        if not runs:
            continue
        pictures = diagnostic(name).draw(runs)
        drawn[name] = [(p.name, p.caption, figures.save(p.figure, out / "figures" / p.name)) for p in pictures]
    return drawn
