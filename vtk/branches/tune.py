"""The training after ``vtk parallelize``: with labels, with the sequential model as teacher, or with that alone."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vtk import console
from vtk.branches.config import ParallelizeConfig
from vtk.card import Card
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.decoding.decode import pixel_limit
from vtk.data.loading.eval_transform import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.loading.train_transform import train_transform
from vtk.data.mirroring import choose_mirroring
from vtk.files import replace_file, write_text
from vtk.filesets import replace_set
from vtk.marks import begins, json_with, safetensors_with
from vtk.models.devices import DTYPES
from vtk.packs.load import card_metadata, load_task
from vtk.packs.plain import plain_call
from vtk.training.engine.fit import fit
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
from vtk.training.runs.view_lines import describe_views

MODEL, LOAD, RUN, DISTILLED, DRIFT = "model.safetensors", "load.py", "finetune", "distilled", "drift.json"
WRITER = "vtk parallelize"
_MODEL = {MODEL: safetensors_with("vtk"), LOAD: begins(f'"""Loads {MODEL} with plain timm."""')}
_DISTILLED = {f"{DISTILLED}/{name}": mark for name, mark in _MODEL.items()}
MARKS = {**_MODEL, DRIFT: json_with("branches", "depth", "model", "transforms"), **_DISTILLED}
"""Files of the command beside the run, and how they are recognised."""


@dataclasses.dataclass(frozen=True)
class Likeness:
    """How alike two models' logits are on some images.

    Attributes:
        count: images.
        cosine: mean over images.
        agreement: share of images with the same most likely class.
    """

    count: int
    cosine: float
    agreement: float

    def __str__(self) -> str:
        return f"logit cosine {self.cosine:.3f}, most likely class equal for {console.percent(self.agreement)}"


@torch.inference_mode()
def likeness(model: nn.Module, other: nn.Module, loader: DataLoader[Any], device: torch.device) -> Likeness:
    """Compare the logits of two models in eval mode over a loader's images."""
    cosines: list[Tensor] = []
    same = 0
    for images, _ in loader:
        a, b = (m(images.to(device)).double() for m in (model, other))
        cosines.append(F.cosine_similarity(a, b, dim=1).cpu())
        same += int((a.argmax(1) == b.argmax(1)).sum())
    found = torch.cat(cosines)
    return Likeness(len(found), float(found.mean()), same / len(found))


def held_out(samples: tuple[Sample, ...], card: Card) -> DataLoader[Any]:
    """Return a loader of held-out images in their order."""
    transform, limit = eval_transform(card.input), pixel_limit(card)
    return make_loader(samples, transform, batch_size=64, shuffle=False, seed=0, workers=0, max_pixels=limit)


def write_model(folder: Path, card: Card, model: nn.Module) -> None:
    """Write ``model.safetensors``, which every command takes, and the ``load.py`` that needs timm alone."""
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    with replace_file(folder / MODEL) as tmp:
        save_file(state, tmp, metadata=card_metadata(card))
    write_text(folder / LOAD, f'"""Loads {MODEL} with plain timm."""\n\n{plain_call(card).program(MODEL)}')


def tune(
    config: ParallelizeConfig, card: Card, teacher: Trained, split: dict[str, Any], samples: tuple[Sample, ...],
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Fine-tune the written model on labelled images, with ``--distill`` also on what ``teacher`` says of them.

    Args:
        config: of the command.
        card: of the parallel model.
        teacher: the sequential model.
        split: how the folder is divided into images to train on and held-out ones.
        samples: held-out images whose classes are the models'; none where they have others.
        device: to compare on.

    Returns:
        What to add to the command's result.
    """
    spec = card.input
    options: dict[str, Any] = {
        "model_kwargs": tuple(f"{k}={json.dumps(v)}" for k, v in card.model.kwargs.items()),
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
    found: dict[str, Any] = {"top1_finetuned": result.top1, "finetune": result.to_dict()}
    if samples:
        tuned = load_task(result.task, base=config.out / MODEL).model.to(device)
        found["after"] = _after(teacher.model.to(device), tuned, samples, card, device)
    return found


def read_loose(config: ParallelizeConfig, card: Card) -> DataAudit | None:
    """Return the images of ``--no-labels``, which need no classes: a tenth of them is held out, or ``val/``.

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
    """Train a copy of ``joined`` on the teacher's word alone, and write it to ``DIR/distilled``.

    The models are compared on the held-out images.

    Returns:
        What to add to the command's result.
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
    # copies: training rounds the student's frozen weights and the teacher to its precision, which is not to be kept
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


def _after(
    sequential: nn.Module, tuned: nn.Module, samples: tuple[Sample, ...], card: Card, device: torch.device
) -> dict[str, Any]:
    found = likeness(sequential, tuned, held_out(samples, card), device)
    console.say(f"after fine-tuning, on {found.count} held-out images: {found}")
    return dataclasses.asdict(found)
