"""Base of the diagnostics: each measures a model, draws the result and explains it in sentences."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.probes.losses import BinaryCrossEntropy, CrossEntropy, Loss
from vtk.analysis.probes.share import ALONE, Share
from vtk.analysis.protocols import Settings, settings_of
from vtk.card import InputSpec
from vtk.data.loading.normalization import to_pixels

Result = Mapping[str, Any]
"""Result of a diagnostic: plain JSON values; every number is finite or None."""

Batches = Iterable[tuple[Tensor, Tensor]]
Need = Literal["labels", "one-label"]


@dataclass(frozen=True)
class Run:
    """A diagnostic's result with the name of its model; two of them where models are compared."""

    label: str
    result: Result


@dataclass(frozen=True)
class Picture:
    """A plot.

    Attributes:
        name: of its files, without suffix; begins with the diagnostic's name.
        figure: matplotlib's, made by `vtk.analysis.figures.new`.
        caption: one or two sentences on axes, units and lines.
    """

    name: str
    figure: Any
    caption: str


@dataclass(frozen=True)
class Context:
    """A model and its images, as passed to diagnostics.

    Attributes:
        model: fp32, on ``device``, in eval mode. A diagnostic leaves it as it was, bit for bit.
        spec: size and preprocessing of its input.
        classes: names of the model's outputs, which the labels refer to; None if the images have other classes.
        multi_label: labels are (B, classes) of 0 and 1, the loss is binary cross-entropy.
        device: of the model and the batches.
        config: the options.
        loader: ``loader(batch_size)`` gives (images, labels) of all chosen images with the evaluation transform, always
            in the same order; on the CPU.
        augmented: ``augmented(batch_size)``: the same images as in training, labels (B, classes) that may be mixed.
        shown: as ``loader``, for the images that may appear in the report; None if all may.
        count: number of images.
        show_progress: bars.
        share: this process's part, where several processes measure together; one of them writes.
        saved: values that an interrupted run of this diagnostic saved with `save`.
        save: saves plain JSON values for a resume; call it regularly in long measurements.
        name: of the diagnostic that the images are for, on which the settings depend.
        images_kind: ``training``, ``partly training``, ``held-out``, ``unseen``, or ``all`` where a folder does not
            say which images are held out.
        digest: hash of the images.
        fresh: gives a new model of the same architecture with random weights; None if it is not known how to build one.
    """

    model: nn.Module
    spec: InputSpec
    classes: tuple[str, ...] | None
    multi_label: bool
    device: torch.device
    config: AnalyzeConfig
    loader: Callable[[int], Batches]
    augmented: Callable[[int], Batches]
    count: int
    shown: Callable[[int], Batches] | None = None
    show_progress: bool = False
    share: Share = ALONE
    saved: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[dict[str, Any]], None] = lambda values: None
    name: str = ""
    images_kind: str = "held-out"
    digest: str = ""
    fresh: Callable[[], nn.Module] | None = None

    @property
    def settings(self) -> Settings:
        """How this diagnostic is measured: explicit options, the protocol's, defaults."""
        return settings_of(self.config, self.name)

    @property
    def curvature_images(self) -> int:
        """Number of images of ``hessian``, ``hessian-blocks`` and ``ntk``."""
        most = self.settings.hessian_images
        return self.count if most is None else min(most, self.count)

    def measurement(self, options: Collection[str] = ("loss_images", "weight_decay")) -> dict[str, Any]:
        """Return what a number of this diagnostic is compared by, as JSON values.

        Args:
            options: that it takes; images are plain, and the loss has no l2 term, for one that does not take these.
        """
        settings = self.settings
        return {
            "images": self.images_kind,
            "loss": "binary cross-entropy" if self.multi_label else "cross-entropy",
            **{
                name: getattr(settings if name in options else Settings, name)
                for name in ("loss_images", "weight_decay")
            },
            "protocol": getattr(self.config, "protocol", None),
        }

    @property
    def batches(self) -> Batches:
        """The chosen images in batches of ``--batch-size``."""
        return self.loader(self.config.batch_size)

    def loss_batches(self, batch_size: int) -> Batches:
        """The images of the loss's landscape: plain or augmented, as ``--loss-images`` says."""
        return (self.augmented if self.settings.loss_images == "augmented" else self.loader)(batch_size)

    @property
    def loss(self) -> Loss:
        """The training loss of the model, with the l2 term of ``--weight-decay``."""
        kind = BinaryCrossEntropy if self.multi_label else CrossEntropy
        return kind(weight_decay=self.settings.weight_decay)

    def loss_options(self, max_images: int) -> dict[str, Any]:
        """Return the keywords that the measures of the loss share."""
        return {
            "loss": self.loss,
            "max_images": max_images,
            "seed": self.config.seed,
            "show_progress": self.show_progress,
        }

    def step_options(self) -> dict[str, Any]:
        """Return the keywords of a measure that works in steps (`vtk.analysis.probes.share.StepOptions`)."""
        return {
            "known": self.saved.get("rows", ()),
            "save": lambda rows: self.save({"rows": rows}),
            "share": self.share,
        }

    def pixels(self, images: Tensor) -> Tensor:
        """Return normalised images (B, C, H, W) as pixel values from 0 to 1."""
        return to_pixels(images, self.spec)


@dataclass(frozen=True)
class Diagnostic:
    """One entry of ``--what``.

    Attributes:
        name: of ``--what`` and of files.
        title: of its section in the report.
        source: paper and figure or equation that it follows.
        explains: one or two sentences for the report: the measured quantity, and the meaning of high and low values.
        measure: from a context to the result. Raises `UsageError` if the model lacks what is measured, `NoResultError`
            if these images give no result; either is reported, and the other diagnostics go on.
        draw: from the results of one or two models to plots that show them together.
        read: from one result to sentences: findings on this model, and suggestions.
        numbers: from one result to its key numbers by name (with the unit), for tables.
        options: the fields of `AnalyzeConfig` that change its result, beside ``seed``, ``batch_size`` and ``split``.
        needs: ``labels`` of the model's classes, or ``one-label`` of each image; refused for others before it is run.
    """

    name: str
    title: str
    source: str
    explains: str
    measure: Callable[[Context], dict[str, Any]]
    draw: Callable[[Sequence[Run]], list[Picture]]
    read: Callable[[Result], list[str]]
    numbers: Callable[[Result], dict[str, float]]
    options: tuple[str, ...] = ()
    needs: frozenset[Need] = frozenset()
