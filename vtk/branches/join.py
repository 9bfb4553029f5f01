"""``parallelize``: join, check, measure, write, and train where asked."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from vtk import console
from vtk.branches.config import ParallelizeConfig
from vtk.branches.tune import (
    DRIFT,
    LOAD,
    MARKS,
    MODEL,
    WRITER,
    distill_images,
    held_out,
    likeness,
    read_loose,
    tune,
    write_model,
)
from vtk.card import Card, Transform
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.audit.scan import scan
from vtk.data.decoding.decode import pixel_limit
from vtk.data.decoding.rules import Decoding
from vtk.data.record import read_record, sort_images
from vtk.data.sources.table import is_table
from vtk.errors import DataError, UsageError, VerificationError
from vtk.evaluation.metrics import evaluate
from vtk.filesets import open_folder, replace_set
from vtk.formats import write_json
from vtk.models.create import check_transforms
from vtk.models.devices import resolve_device
from vtk.models.parallel_models import parallel_spec
from vtk.models.transforms.parallel_blocks import parallelize as join_blocks
from vtk.options import expect
from vtk.packs.plain import plain_call
from vtk.runtime.data_parts import choose_part
from vtk.runtime.drift import Drift, measure_drift
from vtk.runtime.images import choose_images, find_images
from vtk.runtime.opening import open_with_notes
from vtk.runtime.source import Opening, Source
from vtk.training.objectives.distillation import Trained
from vtk.training.runs.outputs import versions
from vtk_export.gate.images import gate_images

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

_ROUNDING = 1e-5  # of the largest logit: one model, built in two ways


@dataclass(frozen=True)
class ParallelizeResult:
    """A parallel model that was written.

    Attributes:
        out: its folder, with ``model.safetensors``, ``load.py`` and ``drift.json``.
        model: the checkpoint, which every function and command takes.
        card: of it.
        drift: how far it is from the sequential model.
        numbers: what ``drift.json`` holds: that, accuracies where there were labels, and what training changed.
    """

    out: Path
    model: Path
    card: Card
    drift: Drift
    numbers: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dict(self.numbers)


def parallelize(
    source: "Openable", config: ParallelizeConfig, **opening: Unpack[Opening]
) -> ParallelizeResult:  # fmt: skip
    """Join blocks of a sequential Vision Transformer, write the parallel model and measure how it differs.

    Args:
        source: a pack, a merged checkpoint, a timm model name, a `Task`, a model of `vtk.create_model`, or an open
            source.
        config: what to join, what to compare on, and whether to train it.
        opening: how to open the source, see `vtk.open_source`.

    Raises:
        UsageError: the source is no sequential ViT, its depth no multiple of the branches, or options contradict it.
        DataError: the source, the images or the output folder cannot be used.
        VerificationError: plain timm computes something else with the written weights.
    """
    expect(config, ParallelizeConfig, "parallelize")
    opening.setdefault("seed", config.seed)
    opened = open_with_notes(source, **opening)
    name = str(source) if isinstance(source, (str, Path)) else opened.name
    return _join(opened, config, name)


def _join(source: Source, config: ParallelizeConfig, name: str) -> ParallelizeResult:
    if source.kind == "onnx":
        raise UsageError(f"{source.path} is an ONNX file; give the pack it was exported from")
    if config.finetune and source.card.input.in_chans != 3:
        raise UsageError(f"`--finetune` trains on images of 3 channels; this model takes {source.card.input.in_chans}")
    spec, join = source.card.model, Transform("parallelize", {"branches": config.branches})
    check_transforms(spec.name, (*source.card.transforms, join), spec.kwargs)
    command = f"vtk parallelize {name} --branches {config.branches}"
    with open_folder(config.out, MARKS, command, overwrite=config.overwrite):
        sequential = source.model()
        blocks: Any = sequential.blocks
        depth = len(blocks)
        joined = copy.deepcopy(sequential)
        join_blocks(joined, branches=config.branches)
        card = _card(source.card, depth, join, command)
        chosen = None
        if config.data is not None:
            chosen = choose_images(source.card, config.data, "val", described=source.described)
        images, what = gate_images(
            card.input, config.images, chosen=chosen, seed=config.seed, max_pixels=pixel_limit(source.card),
        )  # fmt: skip
        _verify(card, joined, images[:2], name)
        device = resolve_device(config.device)
        drift = measure_drift(sequential.to(device), joined.to(device), config.branches, images)
        _print(drift, config, depth, what)
        audit = _labelled(source, config)
        loose = read_loose(config, card)  # before anything is written
        models = sequential, joined
        before = _judge(models, card, audit, device)
        result = {
            "out": str(config.out), "branches": config.branches, "depth": depth // config.branches,
            "model": dataclasses.asdict(card.model), "transforms": [dataclasses.asdict(t) for t in card.transforms],
            "images": what, **_plain(drift), **before,
        }  # fmt: skip
        _write(config, card, joined, result)
        if config.finetune:
            result |= _train(config, source, card, models, loose or audit, before, device, name)
            write_json(config.out / DRIFT, result)
    return ParallelizeResult(config.out, config.out / MODEL, card, drift, result)


def _card(card: Card, depth: int, join: Transform, command: str) -> Card:
    """Return the card of the parallel model: a name of its own where there is one, else a transform of the original."""
    spec, transforms = parallel_spec(card.model, depth, join.args["branches"]), card.transforms
    if spec is None:
        spec, transforms = card.model, (*transforms, join)
    return dataclasses.replace(
        card, model=spec, transforms=transforms, base=None, pack={}, metrics={}, versions=versions(), command=command
    )


@torch.inference_mode()
def _verify(card: Card, model: nn.Module, images: Tensor, name: str) -> None:
    """Build the model as load.py will, and compare."""
    plain = plain_call(card).build()
    try:
        plain.load_state_dict(model.state_dict(), strict=True)
    except RuntimeError as error:  # of a module whose arguments nobody knows
        raise UsageError(
            f"{name} has other weights than timm's `{card.model.name}`, so nobody could load the result; give a pack, "
            "or a model of vtk.create_model"
        ) from error
    want, got = model(images), plain.eval()(images)
    if not bool(torch.isfinite(want).all()):
        raise DataError("the parallel model's logits are infinite or not a number; the weights are damaged")
    if float((want - got).abs().max()) > _ROUNDING * float(want.abs().max()):
        raise VerificationError(
            f"timm builds `{card.model.name}` with parallel blocks to compute something else; nothing was written"
        )


def _write(config: ParallelizeConfig, card: Card, model: nn.Module, result: dict[str, Any]) -> None:
    with replace_set(config.out, MARKS, WRITER) as staged:
        write_model(staged, card, model)
        write_json(staged / DRIFT, result)
    code = plain_call(card).code(repr(MODEL))
    console.say(f"wrote {config.out / MODEL}, {LOAD} and {DRIFT}; plain timm loads it with", *code.splitlines())


def _split(card: Card, config: ParallelizeConfig) -> dict[str, Any]:
    """Return how a folder without a held-out part is divided: as the training run did, where the card tells it."""
    if card.data.get("layout") == "flat" and {"val_split", "seed"} <= card.data.keys():
        return {"val_split": card.data["val_split"], "seed": card.data["seed"]}
    return {"seed": config.seed}


def _labelled(source: Source, config: ParallelizeConfig) -> DataAudit | None:
    """Read the folder, if its classes are the model's and some of its images are held out."""
    if (
        config.data is None
        or not source.described
        or not (config.data.is_dir() or is_table(config.data))
        or not config.labels
    ):
        return None
    if not config.finetune:
        if source.card.multi_label:
            return None
        try:
            audit, part = find_images(source, config.data, "val")
        except DataError:
            return None  # loose images, which the drift was measured on all the same
        return dataclasses.replace(audit, val=part.samples)
    channels, limit = source.card.input.in_chans, pixel_limit(source.card)
    audit = scan(config.data, **_split(source.card, config), in_chans=channels, max_pixels=limit, show_progress=False,
                 decoding=Decoding.of(source.card.input))  # fmt: skip
    if audit.classes != source.card.classes or not audit.val:
        return None
    val = _unseen(source.card, audit, config.data)
    return dataclasses.replace(audit, val=val) if val else None


def _unseen(card: Card, audit: DataAudit, data: Path) -> tuple[Sample, ...]:
    """Return held-out images that the source was not trained on, nor will be by ``--finetune``."""
    record = read_record(card.data)
    if record is None or not sort_images(record, audit, audit.samples).known:
        return audit.val
    held = {sample.path for sample in audit.val}
    try:
        found = choose_part(card, audit, data, "val").samples
    except DataError as error:
        console.warn(f"the models are not compared: {error}")
        return ()
    return tuple(sample for sample in found if sample.path in held)


def _judge(
    models: tuple[nn.Module, nn.Module], card: Card, audit: DataAudit | None, device: torch.device
) -> dict[str, Any]:
    """Return top-1 of the two models on the held-out images, and how alike they are there; None without labels."""
    if audit is None:
        return {"top1_sequential": None, "top1_parallel": None, "before": None}
    loader = held_out(audit.val, card)
    found = [
        evaluate(_on(model, device), loader, audit.classes, device=device, show_progress=False).top1 for model in models
    ]
    alike = likeness(*models, loader, device)
    told = ", ".join(f"{n} {console.percent(v)}" for n, v in zip(("sequential", "parallel"), found, strict=True))
    console.say(f"top-1 on {len(audit.val)} held-out images: {told}; {alike}")
    return {"top1_sequential": found[0], "top1_parallel": found[1], "before": dataclasses.asdict(alike)}


def _on(model: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    def predict(images: Tensor) -> Tensor:
        logits: Tensor = model(images.to(device))
        return logits

    return predict


def _train(
    config: ParallelizeConfig, source: Source, card: Card, models: tuple[nn.Module, nn.Module],
    audit: DataAudit | None, before: dict[str, Any], device: torch.device, name: str,
) -> dict[str, Any]:  # fmt: skip
    """Do what ``--finetune`` asks for; return what to add to the result."""
    sequential, joined = models
    teacher = Trained(sequential, source.card, name, source.described)
    if not config.labels:
        assert audit is not None
        return distill_images(config, card, teacher, joined, audit, device)
    found = tune(config, card, teacher, _split(card, config), audit.val if audit else (), device)
    names = {"top1_sequential": "sequential", "top1_parallel": "parallel"}
    told = [f"{name} {console.percent(before[key])}" for key, name in names.items() if before[key] is not None]
    told.append(f"parallel after --finetune {config.finetune} {console.percent(found['top1_finetuned'])}")
    console.say(f"held-out top-1: {', '.join(told)}")
    return found


def _print(drift: Drift, config: ParallelizeConfig, depth: int, what: str) -> None:
    rows = [
        (f"{row.blocks[0]}–{row.blocks[1]}", console.percent(row.output, 2), console.percent(row.update, 1))
        for row in drift.blocks
    ]
    title = f"{depth} blocks as {depth // config.branches} of {config.branches} branches, on {what}"
    console.table(title, ("blocks", "off, of the output", "off, of the update"), rows)
    console.say(
        f"logits: cosine {drift.cosine_mean:.4f} on average, {drift.cosine_min:.4f} at least; most likely class equal "
        f"for {console.percent(drift.agreement)} of {drift.count} images"
    )
    if config.data is None:
        console.say("random images are no photographs: --data FOLDER gives the drift on your own")


def _plain(drift: Drift) -> dict[str, Any]:
    """Return JSON values; a ratio to nothing is null."""
    return {
        "count": drift.count, "logit_cosine_mean": drift.cosine_mean, "logit_cosine_min": drift.cosine_min,
        "top1_agreement": drift.agreement,
        "blocks": [
            {"first": row.blocks[0], "last": row.blocks[1], "output_ratio": _number(row.output),
             "update_ratio": _number(row.update)}
            for row in drift.blocks
        ],
    }  # fmt: skip


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
