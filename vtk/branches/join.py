"""``parallelize``: joins blocks, verifies and measures the result, writes it, and fine-tunes it on request."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from vtk import console
from vtk.branches.comparison import compare_accuracy, read_labelled, split_options
from vtk.branches.config import ParallelizeConfig
from vtk.branches.tune import (
    DRIFT,
    LOAD,
    MARKS,
    MODEL,
    WRITER,
    distill_images,
    read_loose,
    tune,
    write_model,
)
from vtk.card import Card, Transform
from vtk.data.audit.result import DataAudit
from vtk.data.decoding.decode import pixel_limit
from vtk.errors import DataError, UsageError, VerificationError
from vtk.filesets import open_folder, replace_set
from vtk.formats import write_json
from vtk.models.create import check_transforms
from vtk.models.devices import resolve_device
from vtk.models.parallel_models import parallel_spec
from vtk.models.transforms.parallel_blocks import parallelize as join_blocks
from vtk.options import expect
from vtk.packs.plain import plain_call
from vtk.runtime.drift import Drift, measure_drift
from vtk.runtime.images import choose_images
from vtk.runtime.opening import open_with_notes
from vtk.runtime.source import Opening, Source
from vtk.training.objectives.distillation import Trained
from vtk.training.runs.command_line import versions
from vtk_export.gate.images import gate_images

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

_ROUNDING = 1e-5  # of the largest logit: one model, built in two ways


@dataclass(frozen=True)
class ParallelizeResult:
    """Result of `parallelize`.

    Attributes:
        out: its folder, with ``model.safetensors``, ``load.py`` and ``drift.json``.
        model: the checkpoint, for every function and command.
        card: of the parallel model.
        drift: from the sequential model.
        numbers: contents of ``drift.json``: the drift, accuracies if there were labels, results of fine-tuning.
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
    """Convert a sequential Vision Transformer to parallel blocks, write it and measure the drift.

    Args:
        source: a pack, a merged checkpoint, a timm model name, a `Task`, a model of `vtk.create_model`, or an open
            source.
        config: branches, images for the comparison, fine-tuning.
        opening: how to open the source, see `vtk.open_source`.

    Raises:
        UsageError: the source is no sequential ViT, its depth no multiple of the branches, or options contradict it.
        DataError: the source, the images or the output folder cannot be used.
        VerificationError: plain timm computes different logits from the written weights.
    """
    expect(config, ParallelizeConfig, "parallelize")
    opening.setdefault("seed", config.seed)
    opened = open_with_notes(source, **opening)
    name = str(source) if isinstance(source, (str, Path)) else opened.name
    return _join(opened, config, name)


def _join(source: Source, config: ParallelizeConfig, name: str) -> ParallelizeResult:
    if source.kind == "onnx":
        raise UsageError(f"{source.path} is an ONNX file; give the pack that it was exported from")
    if config.finetune and source.card.input.in_chans != 3:
        raise UsageError(f"`--finetune` needs images with 3 channels; this model takes {source.card.input.in_chans}")
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
        audit = read_labelled(source, config)
        loose = read_loose(config, card)  # before anything is written
        models = sequential, joined
        before = compare_accuracy(models, card, audit, device)
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
    """Return the card of the parallel model: timm's own name if there is one, else a transform of the original."""
    spec, transforms = parallel_spec(card.model, depth, join.args["branches"]), card.transforms
    if spec is None:
        spec, transforms = card.model, (*transforms, join)
    return dataclasses.replace(
        card.uncalibrated(),
        model=spec,
        transforms=transforms,
        base=None,
        pack={},
        metrics={},
        versions=versions(),
        command=command,
    )


@torch.inference_mode()
def _verify(card: Card, model: nn.Module, images: Tensor, name: str) -> None:
    """Build the model as load.py does, and compare logits."""
    plain = plain_call(card).build()
    try:
        plain.load_state_dict(model.state_dict(), strict=True)
    except RuntimeError as error:  # a module whose arguments are not known
        raise UsageError(
            f"{name} has different weights from timm's `{card.model.name}`, so the result could not be loaded; give a "
            "pack, or a model of vtk.create_model"
        ) from error
    want, got = model(images), plain.eval()(images)
    if not bool(torch.isfinite(want).all()):
        raise DataError("the parallel model's logits are infinite or NaN; the weights are damaged")
    if float((want - got).abs().max()) > _ROUNDING * float(want.abs().max()):
        raise VerificationError(
            f"timm's `{card.model.name}` with parallel blocks computes different logits; nothing was written"
        )


def _write(config: ParallelizeConfig, card: Card, model: nn.Module, result: dict[str, Any]) -> None:
    with replace_set(config.out, MARKS, WRITER) as staged:
        write_model(staged, card, model)
        write_json(staged / DRIFT, result)
    code = plain_call(card).code(repr(MODEL))
    console.say(f"wrote {config.out / MODEL}, {LOAD} and {DRIFT}; plain timm loads it with", *code.splitlines())


def _train(
    config: ParallelizeConfig, source: Source, card: Card, models: tuple[nn.Module, nn.Module],
    audit: DataAudit | None, before: dict[str, Any], device: torch.device, name: str,
) -> dict[str, Any]:  # fmt: skip
    """Fine-tune as ``--finetune`` says; return entries for the result."""
    sequential, joined = models
    teacher = Trained(sequential, source.card, name, source.described)
    if not config.labels:
        assert audit is not None
        return distill_images(config, card, teacher, joined, audit, device)
    tuned = tune(config, card, teacher, split_options(card, config), audit.val if audit else (), device)
    names = {"top1_sequential": "sequential", "top1_parallel": "parallel"}
    accuracies = [f"{name} {console.percent(before[key])}" for key, name in names.items() if before[key] is not None]
    accuracies.append(f"parallel after --finetune {config.finetune} {console.percent(tuned['top1_finetuned'])}")
    console.say(f"held-out top-1: {', '.join(accuracies)}")
    return tuned


def _print(drift: Drift, config: ParallelizeConfig, depth: int, what: str) -> None:
    rows = [
        (f"{row.blocks[0]}–{row.blocks[1]}", console.percent(row.output, 2), console.percent(row.update, 1))
        for row in drift.blocks
    ]
    title = f"{depth} blocks as {depth // config.branches} of {config.branches} branches, on {what}"
    console.table(title, ("blocks", "drift / output", "drift / update"), rows)
    console.say(
        f"logits: mean cosine {drift.cosine_mean:.4f}, minimum {drift.cosine_min:.4f}; top-1 agreement "
        f"{console.percent(drift.agreement)} on {drift.count} images"
    )
    if config.data is None:
        console.say("measured on random images; --data FOLDER measures the drift on your own")


def _plain(drift: Drift) -> dict[str, Any]:
    """Return JSON values; undefined ratios are null."""
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
