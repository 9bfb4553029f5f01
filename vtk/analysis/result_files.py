"""Files of an analysis: ``analysis.json`` and one result per diagnostic; written, recognised and read."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vtk import console
from vtk.analysis.diagnostic_names import NAMES
from vtk.errors import DataError
from vtk.formats import read_json, write_json
from vtk.marks import Recognise, any_of, at, json_with, png, says, within
from vtk.marks import page as page_mark

SCHEMA = 1
RESULTS = "results"
_OWN = ("options", "images")  # parts of a result's identity that differ by diagnostic


@dataclass(frozen=True)
class Analysis:
    """Analysis of one model: the contents of ``analysis.json``.

    Attributes:
        label: the model's name, for plots and tables.
        results: of each diagnostic, by name, in the order of the report.
        seconds: time of each diagnostic.
        refused: diagnostics that could not be measured, and the reasons.
        facts: model, images, versions, date, command, for the run details; ``options`` of each diagnostic by name.
        peak_memory_bytes: peak resident memory of this process.
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


def write_files(analysis: Analysis, folder: Path, places: Sequence[Path]) -> None:
    """Write ``analysis.json`` and ``results/NAME.json`` into a folder that is not published yet.

    Args:
        found: by `analyse`.
        folder: to write to; made if absent.
        places: folders to copy ``NAME.json`` from; the first that has it is used.
    """
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    write_json(folder / "analysis.json", analysis.to_dict())
    for name in analysis.results:
        file = next(place / f"{name}.json" for place in places if (place / f"{name}.json").is_file())
        shutil.copyfile(file, folder / RESULTS / file.name)


def kept_results(folder: Path, identity: Mapping[str, Any]) -> list[str]:
    """Return the results in a folder of the same model, folder of images and machine, whatever their options."""
    names = []
    for file in sorted((folder / RESULTS).glob("*.json")):
        try:
            of = read_json(file).get("identity", {})
        except (DataError, AttributeError):
            continue
        if isinstance(of, dict) and {k: v for k, v in of.items() if k not in _OWN} == dict(identity):
            names.append(f"{RESULTS}/{file.name}")
    return names


def file_marks(out: Path, folders: Sequence[str]) -> dict[str, Recognise]:
    """Return the files of a report in ``out`` and how they are recognised.

    Args:
        out: where an earlier report may be.
        folders: in it, of the analyses of two models; empty for one.
    """
    html, analysis = page_mark(), json_with("schema", "label", "results", "facts")
    report = at(out / "report.html", html)
    marks: dict[str, Recognise] = {"report.html": html}
    there = [p.name for p in out.glob("[12]-*") if (p / "analysis.json").is_file()] if out.is_dir() else []
    for folder in ("", *(f"{name}/" for name in sorted({*folders, *there}))):
        marks[f"{folder}analysis.json"] = analysis
        for name in NAMES:
            marks[f"{folder}{RESULTS}/{name}.json"] = json_with("identity")
    marks["figures/*.png"] = png(within=report, dpi=180)
    marks["figures/*.svg"] = any_of(says("<dc:title>vtk</dc:title>"), within(says("Matplotlib"), report))
    return marks


def earlier_result(file: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result or partial result in a file if model, images and options are the same; else empty."""
    if not file.exists():
        return {}
    try:
        values = read_json(file)
    except DataError as error:
        console.warn(f"{error}; the diagnostic is measured again")
        return {}
    if not isinstance(values, dict) or values.get("identity") != dict(identity):
        return {}
    if not _whole(values):
        console.warn(f"{file} is incomplete; the diagnostic is measured again")
        return {}
    return {k: v for k, v in values.items() if k != "identity"}


def _whole(kept: Mapping[str, Any]) -> bool:
    """Return whether a file holds a complete result, or a complete partial result."""
    if "result" in kept:
        return (
            isinstance(kept["result"], dict) and _number(kept.get("seconds")) and _number(kept.get("peak_memory_bytes"))
        )
    partial = kept.get("partial")
    return isinstance(partial, dict) and isinstance(partial.get("values"), dict) and _number(partial.get("seconds"))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> Any:
    """Return JSON values with None in place of NaN and infinities."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not (value - value == 0.0):
        return None
    return value


def read_analysis(folder: Path) -> Analysis:
    """Read the folder of an earlier run.

    Raises:
        DataError: it is not an analysis, or one of another version.
    """
    file = folder / "analysis.json"
    values = read_json(file)
    fields = set(Analysis.__dataclass_fields__)
    if not isinstance(values, dict) or values.get("schema") != SCHEMA or set(values) != {"schema", *fields}:
        raise DataError(f"{file} is not an analysis of this version; analyse the model again")
    kinds = {"label": str, "peak_memory_bytes": int}
    if not all(isinstance(values[name], kinds.get(name, dict)) for name in fields) or not (
        set(values["results"]) <= set(NAMES) and all(isinstance(result, dict) for result in values["results"].values())
    ):
        raise DataError(f"{file} is not a valid analysis, perhaps edited; analyse the model again")
    return Analysis(**{name: values[name] for name in fields})
