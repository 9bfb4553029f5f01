"""Describes a compression and its measurements in lines for people."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.evaluation.choice import MANY_LABELS, ONE_LABEL
from vtk.packs.compression.candidates import LEAST_LIKENESS
from vtk.packs.compression.compress import Compression
from vtk.packs.compression.drop import points
from vtk.packs.compression.write import Images
from vtk.packs.config import CompressConfig

_NAMES = 5


@dataclass
class Report:
    """Lines, warnings among them, and the table of candidates, which comes first."""

    rows: list[tuple[object, ...]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def print_lines(report: Report) -> None:
    """Print a report."""
    if report.rows:
        columns = ("mean rank", "tensors", "expected drop", "measured drop", "agreement", "logits kept", "")
        console.table("On the images that choose", columns, report.rows, left=(6,))
    for line in report.lines:
        console.say(line)
    for line in report.warnings:
        console.warn(line)


def describe(
    found: Compression, config: CompressConfig, images: Images, card: Card, source_bytes: int, pack_bytes: int
) -> Report:
    """Return the report of a written pack."""
    report = Report()
    dtype = card.pack["dtype"]
    report.lines.append(
        f"wrote {config.out}: {console.size(pack_bytes)} in {dtype}, before {console.size(source_bytes)}; lossy; "
        "the exact pack stays where it is"
    )
    report.lines += _of_ranks(found)
    _of_choice(report, found, config, images)
    if found.tuned is not None:
        tuned = found.tuned
        report.lines.append(
            f"tuned for {tuned.steps} steps on {tuned.images} random crops of {images.trained}: KL to the full "
            f"pack {tuned.before:.4f} in the first tenth of them, {tuned.after:.4f} in the last"
        )
    _of_judgement(report, found, config, images, card)
    return report


def _of_ranks(found: Compression) -> list[str]:
    ranks = {name: f.rank for name, f in found.factors.items()}
    matrices = [rank for name, rank in ranks.items() if name not in found.positions]
    lines = []
    if matrices:
        lines.append(
            f"{len(matrices)} matrices as factors, mean rank {found.mean_rank:.1f} (from {min(matrices)} to "
            f"{max(matrices)})"
        )
    errors = found.errors()
    for name in sorted(found.positions & ranks.keys()):
        table = found.task.model.state_dict()[name].double().norm()
        lost = errors[name] * float(found.changes[name].whole.norm()) / float(table)
        lines.append(
            f"{name}: rank {ranks[name]}, which loses {console.percent(errors[name])} of its change's norm, "
            f"{console.percent(lost, 2)} of the table's"
        )
    exact = len(found.task.carried - found.factors.keys())
    kept = sorted(found.changes.keys() - found.factors.keys())
    why = f", among them {_some(kept)}, which factors would not make smaller" if kept else ""
    lines.append(f"exact, in fp32: the other {exact} tensors of the pack{why}")
    return lines


def _of_choice(report: Report, found: Compression, config: CompressConfig, images: Images) -> None:
    how = (
        f"by the gradients of the logits on {found.weighed} {images.trained}"
        if found.weighed
        else "by their share of the matrix's change, without images"
    )
    report.lines.append(f"components are weighed {how}; one threshold cuts all matrices")
    if found.chosen is None or found.judged is None or found.before is None:
        return
    report.rows = [
        (c.mean_rank, console.size(c.nbytes), points(c.expected), points(c.drop), console.percent(c.agreement),
         console.percent(c.likeness), "chosen" if c == found.chosen else "")
        for c in found.candidates
    ]  # fmt: skip
    count = len(found.before) - found.judged.images
    report.lines.append(
        f"chosen on {count} {images.held} (one half, seed {config.seed}): the smallest whose expected drop is at "
        f"most {config.max_drop:g} points, by the full pack's probabilities, calibrated on these images' labels"
    )
    if count * config.max_drop < 100:
        report.lines.append(
            f"one image of these {count} counts {points(1 / count)} points, so {console.percent(LEAST_LIKENESS, 0)} of "
            "the logits' variance had to stay, too"
        )


def _of_judgement(
    report: Report, found: Compression, config: CompressConfig, images: Images, card: Card
) -> None:  # fmt: skip
    judged = found.judged
    if judged is None:
        report.warnings.append(
            "nothing was measured: accuracy and agreement are unknown; --data FOLDER measures them, `vtk eval` the "
            "accuracy"
        )
        return
    which = "the other half, " if found.chosen is not None else ""
    report.lines.append(f"judged on {which}{judged.images} {images.held} ({images.conditions}): {judged}")
    if judged.absent:
        report.warnings.append(
            f"no judging image has {_some(judged.absent)}: nothing is known of {len(judged.absent)} of "
            f"{len(card.classes)} classes"
        )
    bound = config.max_drop / 100
    if found.chosen is not None and judged.drop > bound:
        report.warnings.append(
            f"on the judging half the drop is {points(judged.drop)} points, more than --max-drop {config.max_drop:g}"
        )
    elif found.chosen is not None and judged.high > bound:
        report.lines.append(
            f"{judged.images} images cannot exclude a drop of up to {points(judged.high)} points, beyond --max-drop "
            f"{config.max_drop:g}"
        )
    if found.tuned is not None:
        table = "; the table is from before tuning" if found.chosen is not None else ""
        report.lines.append(f"these numbers are of the tuned pack, as it is stored{table}")
    known = MANY_LABELS if card.multi_label else ONE_LABEL
    shown = [f"{known[name]} {console.percent(card.metrics[name])}" for name in known if name in card.metrics][:1]
    if shown:
        report.lines.append(f"card: {shown[0]} on all {card.metrics['count']} held-out images, as `vtk eval` gives it")
    else:
        report.lines.append("the card has no metrics: these are not exactly the run's held-out images and conditions")


def _some(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{', '.join(map(str, names[:_NAMES]))}{more}"
