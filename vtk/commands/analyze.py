"""``vtk analyze``: why a model behaves as it does, as JSON, plots and one report."""

import dataclasses
import datetime
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtk import console
from vtk.analysis.config import AnalyzeCommand
from vtk.commands import _cli

if TYPE_CHECKING:
    from vtk.analysis.run import Analysis
    from vtk.commands._analyze_models import Images
    from vtk.runtime.source import Source
    from vtk.training.parallel import Ranks

_DESCRIPTION = """Why a model behaves as it does, and what to change: its attention, features, loss, robustness.

Every diagnostic is measured on the same images, drawn, read in plain words, and put into one report.html that needs no
network. A model without what a diagnostic looks at (a ResNet has no attention) gets a line that says so."""


def main(argv: list[str]) -> int:
    """Run ``vtk analyze``; exit code 5 where a diagnostic named one by one could not be done."""
    config = _cli.parse(
        AnalyzeCommand,
        argv,
        prog="vtk analyze",
        description=_DESCRIPTION,
        positional=("model",),
        examples=(
            "vtk analyze runs/pets/task --data data/pets --out analysis/pets",
            "vtk analyze runs/pets/task --data data/pets --what entropy,hessian --out analysis/some",
            "vtk analyze --compare vit_small_patch14_dinov2 runs/pets/task --data data/pets --what features",
            "vtk analyze --compare analysis/before analysis/after --out analysis/both",
            "torchrun --standalone --nproc_per_node 2 -m vtk analyze runs/pets/task --data data/pets --what loss",
        ),
    )
    from vtk.files import prepare_output

    command = shlex.join(["vtk", "analyze", *argv])
    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    from vtk.training.parallel import open_ranks

    ranks = open_ranks(config.device)
    if ranks.main:
        prepare_output(config.out, overwrite=config.overwrite, resume=config.resume)
    ranks.wait()
    found = _pair(config, command, ranks) if config.compare else [_one(config.model, config, command, ranks)]
    if not ranks.main:
        return 0
    _report(found, config, command)
    missing = sorted({name for one in found for name in one.refused} & config.named)
    return 5 if missing else 0


def _one(text: str, config: AnalyzeCommand, command: str, ranks: "Ranks") -> "Analysis":
    from vtk.commands._analyze_models import choose_images, open_models, shared_division

    (source,) = open_models([text], config)
    images = choose_images(source, config, shared_division([source]))
    return _analyse(source, images, config, command, ranks, config.out, source.name)


def _pair(config: AnalyzeCommand, command: str, ranks: "Ranks") -> list["Analysis"]:
    from vtk.analysis.run import read_analysis
    from vtk.commands._analyze_models import choose_images, open_models, shared_division

    assert config.compare is not None
    texts = [text for text in config.compare if not _is_analysis(text)]
    sources = dict(zip(texts, open_models(texts, config), strict=True))
    division = shared_division(list(sources.values()))
    found: list[Analysis] = []
    for text, label in zip(config.compare, _labels(config.compare, sources), strict=True):
        if text not in sources:
            found.append(read_analysis(Path(text)))
            continue
        images = choose_images(sources[text], config, division)
        plain = re.sub(r"[^\w.-]", "_", label)
        folder = config.out / f"{len(found) + 1}-{plain}"
        folder.mkdir(exist_ok=True)
        console.say(f"{label}:")
        found.append(_analyse(sources[text], images, config, command, ranks, folder, label))
    return _told_apart(found, [Path(text).name for text in config.compare])


def _told_apart(found: list["Analysis"], names: Sequence[str]) -> list["Analysis"]:
    """Give two analyses of one name, such as two packs called task, those of their folders."""
    first, second = found
    if first.label != second.label:
        return found
    labels = names if names[0] != names[1] and all(names) else (first.label, f"{second.label} (2)")
    return [dataclasses.replace(one, label=label) for one, label in zip(found, labels, strict=True)]


def _is_analysis(text: str) -> bool:
    return (Path(text) / "analysis.json").is_file()


def _labels(texts: Sequence[str], sources: dict[str, "Source"]) -> list[str]:
    """Return names that differ: the models' own, and where those are the same a number behind the second."""
    names = [sources[text].name if text in sources else Path(text).name for text in texts]
    return [names[0], names[1] if names[1] != names[0] else f"{names[1]} (2)"]


def _analyse(
    source: "Source", images: "Images", config: AnalyzeCommand, command: str, ranks: "Ranks", out: Path, label: str
) -> "Analysis":
    import torch

    import vtk
    from vtk.analysis.run import analyse
    from vtk.commands._analyze_models import describe_input, make_context, model_digest

    context = make_context(source, images, config, ranks)
    identity = {
        "model": model_digest(context.model),
        "input": describe_input(source),
        "images": images.digest(),
        "device": ranks.device.type,
        "world": ranks.world,
        "vtk": vtk.__version__,  # the next one may measure more, or otherwise
    }
    facts: dict[str, Any] = {
        "model": source.card.model.name,
        "source": str(source.path or source.name),
        "data": str(config.data),
        "images": f"{len(images.samples)} of --split {config.split}, drawn with seed {config.seed}",
        "images digest": identity["images"],
        "input": f"{source.card.input.in_chans}×{source.card.input.height}×{source.card.input.width}",
        "device": str(ranks.device),
        "command": command,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": f"vtk {vtk.__version__}, torch {torch.__version__}",
    }
    return analyse(context, config.chosen(), out, label=label, identity=identity, facts=facts, main=ranks.main)


def _report(found: Sequence["Analysis"], config: AnalyzeCommand, command: str) -> None:
    from vtk.analysis.page import page
    from vtk.analysis.run import draw
    from vtk.analysis.tables import print_analyses
    from vtk.files import write_text

    pictures = draw(found, config.out)
    write_text(config.out / "report.html", page(found, pictures))
    print_analyses(found)
    console.say(f"wrote {config.out / 'report.html'}; plots are in {config.out / 'figures'}")
    console.emit_json({"analyses": [one.to_dict() for one in found], "report": str(config.out / "report.html")})
