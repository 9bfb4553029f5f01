"""Trains the parallel model: on labels, with the sequential model as teacher, or on the teacher alone."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vtk import console
from vtk.branches.comparison import compare_tuned, held_out, likeness
from vtk.branches.config import ParallelizeConfig
from vtk.card import Card
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.decoding.decode import pixel_limit
from vtk.data.loading.train_pipeline import train_transform
from vtk.data.mirroring import choose_mirroring
from vtk.files import replace_file, write_text
from vtk.filesets import replace_set
from vtk.marks import begins, json_with, safetensors_with
from vtk.models.devices import DTYPES
from vtk.packs.load import card_metadata, load_task
from vtk.packs.plain import plain_call
from vtk.training.engine.fitting import fit
from vtk.training.engine.precision import make_precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.streams import ImageStream
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.distillation import Distillation, Teacher, Trained
from vtk.training.policies import policy
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.images import read_images
from vtk.training.runs.scoring import default_workers
from vtk.training.runs.views import describe_views

MODEL, LOAD, RUN, DISTILLED, DRIFT = "model.safetensors", "load.py", "finetune", "distilled", "drift.json"
WRITER = "vtk parallelize"
_MODEL = {MODEL: safetensors_with("vtk"), LOAD: begins(f'"""Loads {MODEL} with plain timm."""')}
_DISTILLED = {f"{DISTILLED}/{name}": mark for name, mark in _MODEL.items()}
MARKS = {**_MODEL, DRIFT: json_with("branches", "depth", "model", "transforms"), **_DISTILLED}
"""Files of the command beside the run, and their marks."""


def write_model(folder: Path, card: Card, model: nn.Module) -> None:
    """Write ``model.safetensors``, for every command, and ``load.py``, which needs only timm."""
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    with replace_file(folder / MODEL) as tmp:
        save_file(state, tmp, metadata=card_metadata(card))
    write_text(folder / LOAD, f'"""Loads {MODEL} with plain timm."""\n\n{plain_call(card).program(MODEL)}')


def tune(
    config: ParallelizeConfig, card: Card, teacher: Trained, split: dict[str, Any], samples: tuple[Sample, ...],
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Fine-tune the written model on labelled images, with ``--distill`` also on the outputs of ``teacher``.

    Args:
        config: of the command.
        card: of the parallel model.
        teacher: the sequential model.
        split: how the folder is divided into training and held-out images.
        samples: held-out images, if their classes are the models'; else none.
        device: of the comparison.

    Returns:
        Entries for the command's result.
    """
    spec = card.input
    options: dict[str, Any] = {
        "model_kwargs": tuple(f"{k}={json.dumps(v)}" for k, v in card.model.kwargs.items() if v is not None),
        "branches": next((t.args["branches"] for t in card.transforms if t.op == "parallelize"), 1),
        "interpolation": spec.interpolation, "seed": config.seed, **split,
    }  # fmt: skip
    if config.distill:
        options |= {
            "distill_from": teacher.name, "distill_kind": config.distill_kind, "distill_alpha": config.distill_alpha,
            "distill_temperature": config.distill_temperature,
        }  # fmt: skip
    result = finetune(
        FinetuneConfig(
            data=config.data, out=config.out / RUN, model=card.model.name, weights=config.out / MODEL,
            img_size=spec.size, mean=spec.mean, std=spec.std, crop_pct=spec.crop_pct, resize_mode=spec.resize_mode,
            train=config.train, epochs=config.finetune or 1, lr=config.lr, batch_size=config.batch_size,
            device=config.device, overwrite=config.overwrite, **options,
        ),
        teacher=teacher if config.distill else None,
    )  # fmt: skip
    numbers: dict[str, Any] = {"top1_finetuned": result.top1, "finetune": result.to_dict()}
    if samples:
        tuned = load_task(result.task, base=config.out / MODEL).model.to(device)
        numbers["after"] = compare_tuned(teacher.model.to(device), tuned, samples, card, device)
    return numbers


def read_loose(config: ParallelizeConfig, card: Card) -> DataAudit | None:
    """Read the images of ``--no-labels``, which need no classes: a tenth of them, or ``val/``, is held out.

    Raises:
        DataError: the folder cannot be used, or there are too few.
    """
    if config.labels or not config.finetune:
        return None
    reading = PretrainConfig(
        data=config.data, seed=config.seed, in_chans=card.input.in_chans, max_pixels=pixel_limit(card)
    )
    return read_images(reading, card.input, labelled=False, show_progress=True)


def distill_images(
    config: ParallelizeConfig, card: Card, teacher: Trained, joined: nn.Module, audit: DataAudit, device: torch.device
) -> dict[str, Any]:
    """Train a copy of ``joined`` on the teacher's outputs only, and write it to ``DIR/distilled``.

    The models are compared on the held-out images.

    Returns:
        Entries for the command's result.
    """
    spec, limit = card.input, pixel_limit(card)
    for note in audit.notes:
        console.say(note)
    run = FinetuneConfig(
        data=config.data, epochs=config.finetune or 1, lr=config.lr, batch_size=config.batch_size, head_lr_mult=1.0,
        train=config.train, seed=config.seed, device=config.device, smoothing=0.0,
    )  # fmt: skip
    known = teacher.card.classes if teacher.described else ()
    mirroring = choose_mirroring(dataclasses.replace(audit, classes=known), spec.in_chans)
    console.say(describe_views(run, mirroring, hint=False))
    loader = held_out(audit.val, card)
    sequential, joined = teacher.model.to(device), joined.to(device)
    before = likeness(sequential, joined, loader, device)
    console.say(f"before, on {before.count} held-out images: {before}")
    # copies, because training rounds the student's frozen weights and the teacher to its precision
    student, taught = copy.deepcopy(joined), dataclasses.replace(teacher, model=copy.deepcopy(sequential))
    trained = policy.select(student, config.train)
    policy.apply(student, trained)
    precision = make_precision(run.precision, device)
    stream = ImageStream(
        audit.train, train_transform(spec, hflip=mirroring.probability), batch_size=config.batch_size, seed=config.seed,
        workers=default_workers(None), ranks=Ranks(device), max_pixels=limit,
    )  # fmt: skip
    objective = Distillation(
        None, Teacher(taught, spec, device, DTYPES[precision.name]), student, kind=config.distill_kind, alpha=1.0,
        temperature=config.distill_temperature, spec=spec,
    )  # fmt: skip
    result = fit(student, objective, [stream], run, precision, ranks=Ranks(device))
    masters = precision.master_state_dict(student)
    joined.load_state_dict({k: masters[k] for k in trained | policy.live_buffers(student)}, strict=False)
    folder = config.out / DISTILLED
    with replace_set(config.out, _DISTILLED, WRITER) as staged:
        (staged / DISTILLED).mkdir()
        write_model(staged / DISTILLED, card, joined)
    after = likeness(sequential, joined, loader, device)
    console.say(f"after {len(result.rows)} epochs: {after}; model {folder / MODEL}")
    numbers = {"before": dataclasses.asdict(before), "after": dataclasses.asdict(after)}
    return {"distilled": str(folder), "rows": result.rows, **numbers}
