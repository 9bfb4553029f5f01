"""Models of an analysis, opened on their device, with their images as batches."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.data.mixup import Mixup
from torch import Tensor, nn

from vtk import console
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostics.base import Batches, Context
from vtk.analysis.images import Images
from vtk.analysis.probes.share import Share
from vtk.card import Card
from vtk.data.cpus import usable_cpus
from vtk.data.decoding.decode import pixel_limit
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.loading.samplers import mix
from vtk.data.loading.train_pipeline import train_transform
from vtk.errors import UsageError
from vtk.packs.load import build_from_card
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


def open_model(source: Source, ranks: Ranks) -> nn.Module:
    """Return a source's model in fp32 on this process's device, in eval mode."""
    return source.model().float().to(ranks.device).eval()


def make_context(
    source: Source, images: Images, config: AnalyzeConfig, ranks: Ranks, model: nn.Module | None = None, name: str = ""
) -> Context:
    """Prepare a model, loaded if it is not given, and the images of the diagnostic ``name``."""
    model = open_model(source, ranks) if model is None else model
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
        if min(batch_size, len(samples)) < 2:
            what = "there is 1 image" if batch_size > 1 else "a batch has 1 (`--hessian-batch` or `--batch-size`)"
            raise UsageError(
                f"`--loss-images augmented` mixes images in pairs, and {what}; give 2 or more, or use plain"
            )
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
        name=name,
        images_kind=images.kind,
        digest=images.digest(),
        fresh=None if source.held is not None or source.features else partial(_fresh, source.card, config.seed),
    )


def _fresh(card: Card, seed: int) -> nn.Module:
    return build_from_card(card, pretrained=False, seed=seed).model


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
