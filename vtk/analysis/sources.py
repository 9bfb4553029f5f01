"""Models and images of an analysis: a model on its device, and the same images for every compared model."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.data.mixup import Mixup
from torch import Tensor, nn

from vtk import console
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostics.base import Batches, Context
from vtk.analysis.probes.share import Share
from vtk.card import Card
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.cpus import usable_cpus
from vtk.data.decoding.decode import pixel_limit
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.loading.samplers import mix
from vtk.data.loading.train_pipeline import train_transform
from vtk.data.record import read_record, sort_images
from vtk.errors import UsageError
from vtk.runtime.data_parts import recorded_division
from vtk.runtime.images import find_images
from vtk.runtime.opening import open_source
from vtk.runtime.source import MODELS, Opening, Source
from vtk.training.engine.processes import Ranks

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

_FEW = 200  # up to this many images, starting processes takes longer than decoding


def open_models(models: "Sequence[Openable]", opening: Opening) -> list[Source]:
    """Open one model, or the two that are compared.

    Options for timm names are passed to those, and ``base`` to packs; an option that no model takes is refused.

    Raises:
        UsageError: a source is not a torch model, or an option is for another kind of model.
        DataError: a file is damaged.
    """
    kinds = ["held" if not isinstance(m, (str, Path)) else "file" if Path(m).expanduser().exists() else "name"
             for m in models]  # fmt: skip
    takers = {"base": {"file"}, "trust": {"file"}, "classes": {"held", "name"}, "img_size": {"held", "name"}}
    sources = []
    for model, kind in zip(models, kinds, strict=True):
        options: dict[str, Any] = {}
        for name, value in opening.items():
            mine = takers.get(name, {"name"})
            if kind in mine or not mine & set(kinds):  # an option that none takes is refused
                options[name] = value
        source = open_source(model, **options)
        if source.kind not in MODELS:
            raise UsageError(
                f"{model} is not a torch model; give the pack, checkpoint or timm name that it was exported from"
            )
        for note in () if source is model else source.notes:
            console.say(note)
        sources.append(source)
    return sources


@dataclass(frozen=True)
class Images:
    """The selected images of a model.

    Attributes:
        samples: files with labels, in order.
        classes: names of the labels; None if they are not the model's outputs.
        audit: of the folder.
    """

    samples: tuple[Sample, ...]
    classes: tuple[str, ...] | None
    audit: DataAudit

    def digest(self) -> str:
        """Return a hash of the images: names, labels and contents of the files."""
        digest = hashlib.sha256()
        for path, label in self.samples:
            digest.update(
                f"{path.name}\0{label}\0{self.audit.digests.get(path, '')}\n".encode(errors="surrogateescape")
            )
        return digest.hexdigest()


def choose_images(source: Source, config: AnalyzeConfig, trained: Sequence[Card] = ()) -> Images:
    """Select the images of a model, by the seed.

    Args:
        source: the model.
        config: folder, split, maximum number and seed.
        trained: cards of the models that are analysed (`trained_cards`). The first defines the held-out images; those
            that another model was trained on are left out.

    Raises:
        DataError: there are none, or the folder's classes are not the model's.
    """
    if config.data is None:
        raise UsageError("no images were given; give a folder with --data")
    audit, part = find_images(source, config.data, config.split or "val", trained[0] if trained else None)
    samples = part.samples if config.split in ("train", "all") else _unseen(trained[1:], audit, part.samples)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(config.seed)).tolist()
    chosen = tuple(samples[i] for i in order[: config.max_images])
    return Images(chosen, _classes(source, audit), audit)


def _classes(source: Source, audit: DataAudit) -> tuple[str, ...] | None:
    if source.described:
        return source.card.classes
    outputs = len(source.card.classes)
    if outputs != len(audit.classes):
        console.warn(
            f"{source.name} has {outputs} outputs without class names, the folder has {len(audit.classes)} classes: "
            "diagnostics that need labels are skipped; fine-tune first, or give --num-classes for a random head"
        )
        return None
    if source.random_classifier:
        console.warn(f"{source.name} has a random classifier: its accuracy and loss are at chance level")
    else:
        console.say(f"the sorted classes of the folder are assigned to the {outputs} outputs of {source.name} in order")
    return tuple(audit.classes)


def trained_cards(sources: Sequence[Source]) -> tuple[Card, ...]:
    """Return the cards that record the training images of their runs."""
    cards = tuple(source.card for source in sources if source.card.data.get("images") or recorded_division(source.card))
    divisions = [division for card in cards if (division := recorded_division(card))]
    if any(division != divisions[0] for division in divisions):
        console.warn("the models were trained with different held-out images; those of the first are used for both")
    return cards


def _unseen(cards: Sequence[Card], audit: DataAudit, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Leave out the images that one of these models was trained on."""
    for card in cards:
        record = read_record(card.data)
        trained = sort_images(record, audit, samples).trained if record is not None else ()
        seen = {sample.path for sample in trained}
        if len(seen) == len(samples):
            console.warn("the other model was trained on all of these images")
        elif seen:
            console.say(f"left out: {len(seen)} images that the other model was trained on")
            samples = tuple(sample for sample in samples if sample.path not in seen)
    return samples


def make_context(source: Source, images: Images, config: AnalyzeConfig, ranks: Ranks) -> Context:
    """Load a model and prepare its images."""
    model: nn.Module = source.model().float().to(ranks.device).eval()
    spec, limit = source.card.input, pixel_limit(source.card)
    few = len(images.samples) <= _FEW
    workers = (0 if few else min(usable_cpus(), 8)) if config.workers is None else config.workers
    fixed: dict[str, Any] = {"shuffle": False, "seed": config.seed, "workers": workers, "max_pixels": limit}
    samples: Sequence[Any] = images.samples

    def loader(batch_size: int) -> Batches:
        return make_loader(samples, eval_transform(spec), batch_size=batch_size, **fixed)

    def shown(batch_size: int) -> Batches:
        inside = [sample for sample in samples if images.audit.is_inside(sample.path)]
        if not inside:
            raise UsageError("all images are outside the folder of the table, and a report shows only images inside it")
        return make_loader(inside, eval_transform(spec), batch_size=batch_size, **fixed)

    def augmented(batch_size: int) -> Batches:
        if images.classes is None or source.card.multi_label:
            raise UsageError("`--loss-images augmented` needs images with one label each; use plain")
        recipe = train_transform(spec, crop_scale=(0.08, 1.0), auto_augment=_augment(spec.in_chans), reprob=0.25)
        plain = make_loader(samples, recipe, batch_size=batch_size, **fixed)
        return _mixed(plain, len(images.classes), config.seed)

    return Context(
        model=model,
        spec=spec,
        classes=images.classes,
        multi_label=source.card.multi_label,
        device=ranks.device,
        config=config,
        loader=loader,
        augmented=augmented,
        shown=shown,
        count=len(images.samples),
        show_progress=ranks.main,
        share=Share(ranks.rank, ranks.world, ranks.sum),
    )


def _augment(in_chans: int) -> str | None:
    # Park and Kim (2022) train with DeiT's augmentation
    return "rand-m9-mstd0.5-inc1" if in_chans in (1, 3) else None


def _mixed(batches: Any, classes: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches mixed as in DeiT (mixup 0.8, CutMix 1.0, smoothing 0.1), the same each time."""
    import numpy as np

    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=classes)
    for number, (images, labels) in enumerate(batches):
        if len(images) % 2:  # it mixes pairs
            images, labels = images[:-1], labels[:-1]
        if not len(images):
            continue
        before = np.random.get_state()
        np.random.seed(mix(seed, 0, number) % 2**32)
        try:
            yield mixup(images, labels)
        finally:
            np.random.set_state(before)


def model_digest(model: nn.Module) -> str:
    """Return a hash of the model: its class and every parameter and buffer."""
    digest = hashlib.sha256(f"{type(model).__module__}.{type(model).__qualname__}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe_input(source: Source) -> dict[str, Any]:
    """Return the preprocessing as JSON values."""
    values = source.card.input.to_dict()
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
