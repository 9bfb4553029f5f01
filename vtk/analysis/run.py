"""Do diagnostics one after the other, keep each result as soon as it is there, and take up those of a stopped run."""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from vtk import console
from vtk.analysis.diagnostics import NAMES, diagnostic
from vtk.analysis.diagnostics.base import Context, Diagnostic, Run
from vtk.errors import DataError, UsageError
from vtk.formats import read_json, write_json
from vtk.marks import Recognise, any_of, at, json_with, png, says, within
from vtk.marks import page as page_mark

SCHEMA = 1
RESULTS = "results"
_COMMON = ("seed", "batch_size")


@dataclass(frozen=True)
class Analysis:
    """What was found of one model: the contents of ``analysis.json``.

    Attributes:
        label: the model's name, for plots and tables.
        results: of each diagnostic, by name in the report's order.
        seconds: each took, as long as it ran.
        refused: diagnostics that could not be done, and why.
        facts: model, images, versions, date, command, for the report's end; ``options`` of each diagnostic by its name.
        peak_memory_bytes: highest resident memory of this process while it ran.
    """

    label: str
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"schema": SCHEMA, **asdict(self)}


def analyse(
    context: Context,
    names: Sequence[str],
    out: Path,
    *,
    label: str,
    identity: Mapping[str, Any],
    facts: Mapping[str, Any],
    main: bool = True,
    work: Path | None = None,
) -> Analysis:
    """Run diagnostics and write ``out/results/NAME.json`` after each, ``out/analysis.json`` at the end.

    Args:
        context: model and images.
        names: of diagnostics, in order.
        out: of the report. Results of an earlier run in it are taken where their ``identity`` is this one's.
        label: the model's name.
        identity: what results depend on beside the options, as JSON values: model, images, device.
        facts: for the report.
        main: whether this process writes; others measure with it.
        work: folder that gets ``NAME.json`` in place of ``out``, where `put` makes files of a report of them later.

    Returns:
        What was found; what a model has not is in ``refused``, with the reason.
    """
    options: dict[str, Any] = {}
    found = Analysis(label, facts={**facts, "options": options})
    (folder := work or out / RESULTS).mkdir(parents=True, exist_ok=True)
    peak = 0
    for number, name in enumerate(names, start=1):
        one = diagnostic(name)
        options[name] = {o: plain(getattr(context.config, o)) for o in (*_COMMON, *one.options)}
        of = {**identity, "options": options[name]}
        file = folder / f"{name}.json"
        kept = _kept(file, of)
        if "result" not in kept and folder != out / RESULTS:
            kept = _kept(out / RESULTS / file.name, of) or kept
        if "result" not in kept:
            if main:
                console.say(f"{number}/{len(names)} {one.title}")
            reason = _unmet(one, context)
            if reason is None:
                try:
                    kept = _measured(one, context, file, of, kept.get("partial", {}), main)
                except UsageError as error:
                    reason = str(error)
            if reason is not None:
                found.refused[name] = reason
                if main:
                    console.warn(f"{name}: {reason}")
                continue
        found.results[name], found.seconds[name] = kept["result"], kept["seconds"]
        peak = max(peak, kept["peak_memory_bytes"])
    found = replace(found, peak_memory_bytes=peak)
    if main and work is None:
        write_json(out / "analysis.json", found.to_dict())
    return found


def put(found: Analysis, folder: Path, places: Sequence[Path]) -> None:
    """Write ``analysis.json`` and ``results/NAME.json`` into a folder that nobody reads yet.

    Args:
        found: by `analyse`.
        folder: to write to; made if absent.
        places: folders that have ``NAME.json``, the first that has one counts.
    """
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    write_json(folder / "analysis.json", found.to_dict())
    for name in found.results:
        file = next(place / f"{name}.json" for place in places if (place / f"{name}.json").is_file())
        shutil.copyfile(file, folder / RESULTS / file.name)


def kept_results(folder: Path, identity: Mapping[str, Any]) -> list[str]:
    """Return the results in a folder that are of the same model, images and machine, whichever their options were."""
    found = []
    for file in sorted((folder / RESULTS).glob("*.json")):
        try:
            of = read_json(file).get("identity", {})
        except (DataError, AttributeError):
            continue
        if isinstance(of, dict) and {k: v for k, v in of.items() if k != "options"} == dict(identity):
            found.append(f"{RESULTS}/{file.name}")
    return found


def marks(out: Path, folders: Sequence[str]) -> dict[str, Recognise]:
    """Return the files of a report in ``out`` and how they are recognised.

    Args:
        out: where an earlier report may be.
        folders: in it, of the analyses of two models; of one there is none.
    """
    html, analysis = page_mark(), json_with("schema", "label", "results", "facts")
    report = at(out / "report.html", html)
    found: dict[str, Recognise] = {"report.html": html}
    there = [p.name for p in out.glob("[12]-*") if (p / "analysis.json").is_file()] if out.is_dir() else []
    for folder in ("", *(f"{name}/" for name in sorted({*folders, *there}))):
        found[f"{folder}analysis.json"] = analysis
        for name in NAMES:
            found[f"{folder}{RESULTS}/{name}.json"] = json_with("identity")
    found["figures/*.png"] = png(within=report, dpi=180)
    found["figures/*.svg"] = any_of(says("<dc:title>vtk</dc:title>"), within(says("Matplotlib"), report))
    return found


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
    kept = {
        "result": result,
        "seconds": before + time.monotonic() - begun,
        "peak_memory_bytes": _peak_memory(),
    }
    if main:
        write_json(file, {"identity": dict(identity), **kept})
    return kept


def _kept(file: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier run left of a diagnostic, if it was of the same model, images and options."""
    if not file.exists():
        return {}
    try:
        found = read_json(file)
    except DataError as error:
        console.warn(f"{error}; it is measured again")
        return {}
    if not isinstance(found, dict) or found.get("identity") != dict(identity):
        return {}
    if not _whole(found):
        console.warn(f"{file} lacks part of what was measured; it is measured again")
        return {}
    return {k: v for k, v in found.items() if k != "identity"}


def _whole(kept: Mapping[str, Any]) -> bool:
    """Return whether a file has all of a result, or all of what an interrupted diagnostic kept."""
    if "result" in kept:
        return (
            isinstance(kept["result"], dict) and _number(kept.get("seconds")) and _number(kept.get("peak_memory_bytes"))
        )
    partial = kept.get("partial")
    return isinstance(partial, dict) and isinstance(partial.get("values"), dict) and _number(partial.get("seconds"))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unmet(one: Diagnostic, context: Context) -> str | None:
    if one.needs and context.classes is None:
        return "it needs labels of the model's classes, and the folder's classes are others; fine-tune first"
    if "one-label" in one.needs and context.multi_label:
        return "it needs one label for each image, and this model gives several"
    return None


def finite(value: Any) -> Any:
    """Return JSON values with NaN and infinities as None: what was not defined is not a number."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not (value - value == 0.0):
        return None
    return value


def plain(value: Any) -> Any:
    """Return an option as the JSON value that it is read back as."""
    return list(value) if isinstance(value, tuple) else value


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return int(psutil.Process().memory_info().peak_wset)  # type: ignore[attr-defined]
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def read_analysis(folder: Path) -> Analysis:
    """Read the folder of an earlier run.

    Raises:
        DataError: it is none, or of another version.
    """
    file = folder / "analysis.json"
    found = read_json(file)
    fields = set(Analysis.__dataclass_fields__)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or set(found) != {"schema", *fields}:
        raise DataError(f"{file} is no analysis of this version; analyse the model again")
    kinds = {"label": str, "peak_memory_bytes": int}
    if not all(isinstance(found[name], kinds.get(name, dict)) for name in fields) or not (
        set(found["results"]) <= set(NAMES) and all(isinstance(result, dict) for result in found["results"].values())
    ):
        raise DataError(f"{file} is no analysis; was it edited? Analyse the model again")
    return Analysis(**{name: found[name] for name in fields})


def draw(analyses: Sequence[Analysis], out: Path) -> dict[str, list[tuple[str, str, bytes]]]:
    """Draw every diagnostic with the analyses that have it, as ``out/figures/NAME.png`` and ``.svg``.

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
