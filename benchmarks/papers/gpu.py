"""The same experiments at the scale of CIFAR on one GPU, and what they are planned to take.

Models are three times as wide, AlterNet's and ResNet's channels those of the paper, and 7,000 images of 32 px take the
place of 1,000. Nothing here has been timed on a GPU: the plan rests on counted products and images, and the runner ends
at its time limit whether it holds or not.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from papers.experiment import Experiment, Job, Settings, Trained, digest_of

MINUTES = 8.0
"""Time limit of a call of the runner."""
TRAIN, VAL = 7000, 2000
"""Images to train on and held out."""
PROCESSES = 12
"""Jobs at a time: each keeps one core busy with images, and small models leave room on a card."""
FLOP_PER_S = 2e13
"""Assumed, of all processes together: small products reach a few percent of what a large card can do."""
IMAGES_PER_S = 2000.0
"""Assumed, of a process: decoded, cropped, mirrored and trained."""
_FACTORS = {"embed_dim": 3, "num_heads": 3, "head_dim": 4, "channels": 4}
_COUNTED: dict[str, int] = {}
_ARCHITECTURE = ("model", "model_kwargs", "img_size", "stem", "branches", "cb", "local_attention")


def at_cifar_scale(experiment: Experiment) -> Experiment:
    """Return an experiment with the settings that it has on a GPU."""
    settings = {**_scaled(experiment.settings), "scale": "CIFAR, one GPU"}
    return replace(experiment, settings=settings, photographs=settings)


@dataclass(frozen=True)
class Plan:
    """What runs are planned to take.

    Attributes:
        runs: that are trained, those that experiments share once.
        flops: of forward and backward passes, two per multiply-add.
        images: that go through training, with repeats.
    """

    runs: int
    flops: float
    images: float

    @property
    def seconds(self) -> float:
        """The larger of what products and images take; evaluation and measures come on top."""
        return max(self.flops / FLOP_PER_S, self.images / IMAGES_PER_S / PROCESSES)

    def __str__(self) -> str:
        return (
            f"planned: {self.runs} runs, {self.flops:.2g} FLOP, {self.images:,.0f} training images; about "
            f"{self.seconds / 60:.0f} minutes at the rates in benchmarks/papers/gpu.py, which are assumed, not measured"
        )


def plan(experiments: Sequence[Experiment], seeds: int, train: int, count: Callable[[Settings], int]) -> Plan:
    """Count the runs of experiments without doing them.

    Args:
        experiments: with the settings of the GPU.
        seeds: of each.
        train: images to train on.
        count: returns the FLOP of a forward pass of one image for a run's options; `forward_flops`.
    """
    runs: dict[str, Settings] = {}
    for experiment in experiments:
        job = _Rehearsal(experiment.settings, Path("images"), {}, 0.5, 0, Path("runs"), found=runs)
        experiment.run(job)
    images = {digest: train * _share(options) * options["epochs"] for digest, options in runs.items()}
    # a backward pass is two forward passes; SAM's first step is another of both
    flops = {d: images[d] * 3 * (2 if runs[d].get("sam") else 1) * count(runs[d]) for d in runs}
    return Plan(seeds * len(runs), seeds * sum(flops.values()), seeds * sum(images.values()))


def forward_flops(options: Settings) -> int:
    """Count the products of a forward pass of one image, of a run with these options."""
    from vtk.models.arguments import parse_model_kwargs
    from vtk.models.create import build_model
    from vtk.profiling.work import work_of
    from vtk.training.train_config import TrainConfig

    own = {name: options[name] for name in _ARCHITECTURE if name in options}
    if (known := _COUNTED.get(digest_of(own))) is not None:
        return known
    config = TrainConfig(data=Path("images"), out=Path("runs"), **own)
    created = build_model(
        options["model"], num_classes=10, pretrained=False, transforms=config.transforms(),
        kwargs=parse_model_kwargs(config.model_kwargs), img_size=config.img_size,
    )  # fmt: skip
    work = work_of(created.model, (3, 32, 32), 10)
    if work is None:
        raise ValueError(f"the products of {own} cannot be counted")
    _COUNTED[digest_of(own)] = work.flops
    return work.flops


@dataclass
class _Rehearsal(Job):
    """A job whose runs are noted and not done."""

    found: dict[str, Settings] = field(default_factory=dict)

    def _once(self, kind: str, name: str, options: Settings, go: object) -> Trained:
        options = {**self.settings["common"], **options}
        self.found[digest_of([kind, options])] = options
        return Trained({"top1": 0.0, "loss": 0.0, "images_per_second": 1.0}, None)


def _share(options: Settings) -> float:
    """Return the fraction of the images that a run takes: of half of the classes, half."""
    return 0.5 if Path(options.get("data", "all")).name in ("first", "second") else 1.0


def _scaled(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found[name] = _scaled(value)
        elif isinstance(value, tuple) and all(isinstance(item, str) for item in value):
            found[name] = tuple(_wider(item) for item in value)
        elif name == "epochs":
            found[name] = max(2, round(0.3 * value))
        elif name == "batch_size" and "img_size" in settings:  # of training, not of a measure
            found[name] = 4 * value
        else:
            found[name] = value
    return found


def _wider(argument: str) -> str:
    """Return an argument of a model, such as ``embed_dim=64``, for the larger one."""
    name, _, value = argument.partition("=")
    factor = _FACTORS.get(name, 1)
    return f"{name}={re.sub(r'[0-9]+', lambda number: str(factor * int(number[0])), value)}"
