"""``analyze``: measures a model, or two side by side, and writes numbers, plots and one report."""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from vtk import console
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.facts import facts_of, identity_of
from vtk.analysis.images import Selection, trained_cards
from vtk.analysis.report.page import page
from vtk.analysis.report.terminal import print_analyses
from vtk.analysis.result_files import RESULTS, Analysis, file_marks, kept_results, read_analysis, write_files
from vtk.analysis.run import check_options, draw, run_diagnostics
from vtk.analysis.sources import make_context, model_digest, open_model, open_models
from vtk.files import write_text
from vtk.filesets import open_folder, replace_set
from vtk.nodes import HIDDEN
from vtk.options import expect
from vtk.packages import require
from vtk.readers import reading
from vtk.runtime.source import Opening, Source
from vtk.training.engine.processes import Ranks, open_ranks

if TYPE_CHECKING:
    from vtk.runtime.source import Openable


_WAITING = f"{HIDDEN}waiting"


@dataclass(frozen=True)
class AnalyzeResult:
    """Result of an analysis, and its report.

    Attributes:
        analyses: of one model, or of two.
        report: the page.
        missing: diagnostics that were requested by name and could not be measured.
    """

    analyses: tuple[Analysis, ...]
    report: Path
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"analyses": [one.to_dict() for one in self.analyses], "report": str(self.report)}


def analyze(
    source: "Openable",
    config: AnalyzeConfig | None = None,
    *,
    against: "Openable | None" = None,
    command: str = "",
    **opening: Unpack[Opening],
) -> AnalyzeResult:
    """Measure a model with diagnostics on the same images, and write plots and a report.

    With several processes (torchrun) all call it; the main process writes.

    Args:
        source: a path, a timm name, a `Task`, a module in memory, or an open source; with ``against`` also the folder
            of an earlier analysis.
        config: diagnostics, images and output.
        against: a second model, or the folder of its analysis, shown beside the first.
        command: shown in the report.
        opening: how to open the source, see `vtk.open_source`; of two, each takes the options that apply to it.

    Raises:
        UsageError: a source is not a torch model, or an option is for another kind of model, or for diagnostics that
            are not measured.
        DataError: the images, a file or the output folder cannot be used.
        UnavailableError: the device or matplotlib is not available.
    """
    require("matplotlib")
    config = config or AnalyzeConfig()
    expect(config, AnalyzeConfig, "analyze")
    check_options(config)
    opening.setdefault("seed", config.seed)
    ranks = open_ranks(config.device)
    with contextlib.ExitStack() as stack:
        if ranks.main:
            stack.enter_context(
                open_folder(
                    config.out, file_marks(config.out, ()), command or "vtk analyze", overwrite=config.overwrite,
                    resume=config.resume,
                )
            )  # fmt: skip
        ranks.wait()
        parts = Parts(config.out)
        before = torch.get_num_threads()
        torch.set_num_threads(config.threads or before)
        try:
            if against is None:
                analyses = [_one(source, config, command, ranks, opening, parts)]
            else:
                analyses = _pair((source, against), config, command, ranks, opening, parts)
        finally:
            torch.set_num_threads(before)
        report = config.out / "report.html"
        if ranks.main:
            parts.publish(analyses)
            print_analyses(analyses)
            console.say(f"wrote {report}; plots are in {config.out / 'figures'}")
        ranks.wait()
    missing = {name for one in analyses for name in one.refused} & config.named
    return AnalyzeResult(tuple(analyses), report, tuple(sorted(missing)))


class Parts:
    """Keeps results in place until the report is written.

    Beside an earlier report new results would contradict it, so they are kept in a hidden folder until then.

    Args:
        out: folder of the report.

    Attributes:
        measured: of each folder in ``out``, the number of the analysis that goes there.
        identity: of each, the model, images and machine that its results depend on.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.fresh = out, not any((out / name).exists() for name in ("report.html", "analysis.json"))
        self.measured: dict[str, int] = {}
        self.identity: dict[str, dict[str, Any]] = {}

    def work(self, name: str, number: int) -> Path:
        """Return the folder for the results of analysis ``number``, which is published to the folder ``name``."""
        self.measured[name] = number
        return self.out / name / RESULTS if self.fresh else self.out / _WAITING / name

    def publish(self, analyses: Sequence[Analysis]) -> None:
        """Write the report: all of its files or none.

        Raises:
            DataError: the folder cannot be written.
        """
        files = file_marks(self.out, [name for name in self.measured if name])
        kept = [
            f"{name}/{file}".lstrip("/") for name, of in self.identity.items()
            for file in kept_results(self.out / name, of)
        ]  # fmt: skip
        with replace_set(self.out, files, "vtk analyze", kept) as staged:
            for name, number in self.measured.items():
                write_files(analyses[number], staged / name, (self.work(name, number), self.out / name / RESULTS))
            with _checked_results(len(analyses) > len(self.measured)):
                text = page(analyses, draw(analyses, staged))
            write_text(staged / "report.html", text)
        shutil.rmtree(self.out / _WAITING, ignore_errors=True)


@contextlib.contextmanager
def _checked_results(read: bool) -> Iterator[None]:
    """Turn errors of results that were ``read`` into one line: others may have edited them."""
    with contextlib.ExitStack() as stack:
        if read:
            stack.enter_context(reading("an earlier analysis", "has results that cannot be shown", "analyse again"))
        yield


def _one(
    source: "Openable", config: AnalyzeConfig, command: str, ranks: Ranks, opening: Opening, parts: Parts
) -> Analysis:
    (opened,) = open_models([source], opening)
    images = Selection(opened, config, trained_cards([opened]))
    return _analyse(opened, images, config, command, ranks, parts, ("", 0), opened.name)


def _pair(
    models: "Sequence[Openable]", config: AnalyzeConfig, command: str, ranks: Ranks, opening: Opening, parts: Parts
) -> list[Analysis]:
    fresh = [i for i, model in enumerate(models) if not _is_analysis(model)]
    sources = dict(zip(fresh, open_models([models[i] for i in fresh], opening), strict=True))
    trained = trained_cards(list(sources.values()))
    names = [sources[i].name if i in sources else Path(str(model)).name for i, model in enumerate(models)]
    labels = [names[0], names[1] if names[1] != names[0] else f"{names[1]} (2)"]
    analyses: list[Analysis] = []
    for i, label in enumerate(labels):
        if i not in sources:
            analyses.append(read_analysis(Path(str(models[i]))))
            continue
        images = Selection(sources[i], config, trained)
        plain = re.sub(r"[^\w.-]", "_", label)
        name = f"{i + 1}-{plain}"
        console.say(f"{label}:")
        analyses.append(_analyse(sources[i], images, config, command, ranks, parts, (name, i), label))
    return _distinct_labels(analyses, [Path(m).name if isinstance(m, (str, Path)) else "" for m in models])


def _distinct_labels(analyses: list[Analysis], names: Sequence[str]) -> list[Analysis]:
    """Label two analyses of one name, such as two packs called task, by their folders."""
    first, second = analyses
    if first.label != second.label:
        return analyses
    labels = names if names[0] != names[1] and all(names) else (first.label, f"{second.label} (2)")
    return [dataclasses.replace(one, label=label) for one, label in zip(analyses, labels, strict=True)]


def _is_analysis(model: "Openable") -> bool:
    return isinstance(model, (str, Path)) and (Path(model) / "analysis.json").is_file()


def _analyse(
    source: Source, images: Selection, config: AnalyzeConfig, command: str, ranks: Ranks, parts: Parts,
    place: tuple[str, int], label: str,
) -> Analysis:  # fmt: skip
    names = config.chosen()
    of = {name: images.of(name) for name in names}
    model = open_model(source, ranks)
    identity = identity_of(
        source, model_digest(model), next(iter(of.values())), device=ranks.device.type, world=ranks.world
    )
    facts = facts_of(source, of, config, device=ranks.device, command=command)
    parts.identity[place[0]] = identity
    return run_diagnostics(
        lambda name: make_context(source, of[name], config, ranks, model, name), names, config.out / place[0],
        label=label, identity=identity, facts=facts, main=ranks.main, work=parts.work(*place),
    )  # fmt: skip
