"""Compares the sequential and the parallel model on held-out images: logits, and top-1 where there are labels."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vtk import console
from vtk.branches.config import ParallelizeConfig
from vtk.card import Card
from vtk.data.audit.folder_scan import scan
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.decoding.decode import pixel_limit
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.record import read_record, sort_images
from vtk.data.sources.table import is_table
from vtk.errors import DataError
from vtk.evaluation.metrics import evaluate
from vtk.runtime.data_parts import choose_part
from vtk.runtime.images import find_images
from vtk.runtime.source import Source


@dataclasses.dataclass(frozen=True)
class Likeness:
    """Likeness of two models' logits on the same images.

    Attributes:
        count: images.
        cosine: mean over images.
        agreement: share of images with the same top-1 class.
    """

    count: int
    cosine: float
    agreement: float

    def __str__(self) -> str:
        return f"logit cosine {self.cosine:.3f}, top-1 agreement {console.percent(self.agreement)}"


@torch.inference_mode()
def likeness(model: nn.Module, other: nn.Module, loader: DataLoader[Any], device: torch.device) -> Likeness:
    """Compare the logits of two models in eval mode over a loader's images."""
    cosines: list[Tensor] = []
    same = 0
    for images, _ in loader:
        a, b = (m(images.to(device)).double() for m in (model, other))
        cosines.append(F.cosine_similarity(a, b, dim=1).cpu())
        same += int((a.argmax(1) == b.argmax(1)).sum())
    cosine = torch.cat(cosines)
    return Likeness(len(cosine), float(cosine.mean()), same / len(cosine))


def held_out(samples: tuple[Sample, ...], card: Card) -> DataLoader[Any]:
    """Return a loader of held-out images in their order."""
    transform, limit = eval_transform(card.input), pixel_limit(card)
    return make_loader(samples, transform, batch_size=64, shuffle=False, seed=0, workers=0, max_pixels=limit)


def split_options(card: Card, config: ParallelizeConfig) -> dict[str, Any]:
    """Return how to divide a folder without a held-out part: as the training run did, if the card records it."""
    if card.data.get("layout") == "flat" and {"val_split", "seed"} <= card.data.keys():
        return {"val_split": card.data["val_split"], "seed": card.data["seed"]}
    return {"seed": config.seed}


def read_labelled(source: Source, config: ParallelizeConfig) -> DataAudit | None:
    """Read the folder if its classes are the model's and some of its images are held out; else None."""
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
            return None  # images without labels, on which the drift was measured
        return dataclasses.replace(audit, val=part.samples)
    channels, limit = source.card.input.in_chans, pixel_limit(source.card)
    audit = scan(
        config.data, **split_options(source.card, config), in_chans=channels, max_pixels=limit, show_progress=False,
        decoding=Decoding.of(source.card.input),
    )  # fmt: skip
    if audit.classes != source.card.classes or not audit.val:
        return None
    val = _unseen(source.card, audit, config.data)
    return dataclasses.replace(audit, val=val) if val else None


def _unseen(card: Card, audit: DataAudit, data: Path) -> tuple[Sample, ...]:
    """Return the held-out images that neither the source nor ``--finetune`` trains on."""
    record = read_record(card.data)
    if record is None or not sort_images(record, audit, audit.samples).known:
        return audit.val
    held = {sample.path for sample in audit.val}
    try:
        part = choose_part(card, audit, data, "val").samples
    except DataError as error:
        console.warn(f"the models are not compared: {error}")
        return ()
    return tuple(sample for sample in part if sample.path in held)


def compare_accuracy(
    models: tuple[nn.Module, nn.Module], card: Card, audit: DataAudit | None, device: torch.device
) -> dict[str, Any]:
    """Return top-1 and logit agreement of the two models on the held-out images; None without labels."""
    if audit is None:
        return {"top1_sequential": None, "top1_parallel": None, "before": None}
    loader = held_out(audit.val, card)
    top1 = [
        evaluate(_on(model, device), loader, audit.classes, device=device, show_progress=False).top1 for model in models
    ]
    alike = likeness(*models, loader, device)
    accuracies = ", ".join(f"{n} {console.percent(v)}" for n, v in zip(("sequential", "parallel"), top1, strict=True))
    console.say(f"top-1 on {len(audit.val)} held-out images: {accuracies}; {alike}")
    return {"top1_sequential": top1[0], "top1_parallel": top1[1], "before": dataclasses.asdict(alike)}


def _on(model: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    def predict(images: Tensor) -> Tensor:
        logits: Tensor = model(images.to(device))
        return logits

    return predict


def compare_tuned(
    sequential: nn.Module, tuned: nn.Module, samples: tuple[Sample, ...], card: Card, device: torch.device
) -> dict[str, Any]:
    """Print and return how close the tuned model is to the sequential one on held-out images."""
    alike = likeness(sequential, tuned, held_out(samples, card), device)
    console.say(f"after fine-tuning, on {alike.count} held-out images: {alike}")
    return dataclasses.asdict(alike)
