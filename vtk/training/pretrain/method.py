"""Interface of a pre-training method; `vtk.training.pretrain.run` does the rest, which is the same for all methods.

A method turns a backbone (a timm model without classifier) into a model to train, defines its objective, and draws
results. The run reads the images, trains through `vtk.training.fit`, scores the held-out images with the same
objective, resumes, and writes ``backbone.safetensors``. A new method is a class of this protocol and a line in
`METHODS`; its flags are a group of options among the parents of `vtk.training.pretrain.config.PretrainConfig`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from vtk.card import InputSpec
from vtk.data.audit.result import DataAudit
from vtk.data.loading.loader import Transform
from vtk.data.loading.train_pipeline import TrainTransform
from vtk.training.engine.processes import Ranks
from vtk.training.engine.step_rule import StepRule
from vtk.training.objectives.base import Objective
from vtk.training.pretrain.config import PretrainConfig

METHODS: Mapping[str, str] = {
    "beit": "vtk.training.pretrain.beit:Beit",
    "dino": "vtk.training.pretrain.dino.method:Dino",
    "mae": "vtk.training.pretrain.mae:Mae",
    "simmim": "vtk.training.pretrain.simmim:SimMim",
    "supcon": "vtk.training.pretrain.supcon:SupCon",
}
"""Name on the command line → module and class, imported on first use."""


@dataclass(frozen=True)
class Setting:
    """The run that a method is part of.

    Attributes:
        config: of the run, every value resolved.
        spec: size and statistics of the images.
        ranks: this process and the others.
        out: folder of the run.
        audit: the images; all with label 0 if the method is not `Method.labelled`.
        workers: processes that load images, for each training process.
    """

    config: PretrainConfig
    spec: InputSpec
    ranks: Ranks
    out: Path
    audit: DataAudit
    workers: int


class Method(Protocol):
    """A kind of pre-training; made without arguments, for one run.

    Attributes:
        labelled: whether class folders are read. ``Batch.labels`` are then classes. Otherwise they are seeds, one
            for each image and epoch, which do not depend on the number of processes (`vtk.training.pretrain.seeds`).
    """

    labelled: bool

    def check(self, backbone: nn.Module, config: PretrainConfig, spec: InputSpec) -> None:
        """Refuse a backbone that the method cannot train, before any image is read.

        Args:
            backbone: without values (on the meta device), its transforms not yet applied.
            config: of the run.
            spec: size of the images.

        Raises:
            UsageError: the backbone, or an option that does not fit it.
        """

    def transforms(self, augment: Callable[..., TrainTransform], plain: Transform) -> tuple[Transform, Transform]:
        """Return the transforms of training images and of held-out images.

        Args:
            augment: makes a transform of random crop, flip and colours, as the flags say, but for the arguments of
                `train_transform` that it is given.
            plain: the same every time.
        """

    def model(self, backbone: nn.Module, setting: Setting) -> nn.Module:
        """Return the model to train, which holds ``backbone`` as its attribute ``backbone``.

        It is fp32 and on the CPU. What it has besides is drawn from torch's generator, which is seeded. Parameters that
        get no gradient must not require one. Its method ``no_weight_decay()`` names further parameters without
        weight decay, and ``set_grad_checkpointing(on)`` hands on to the backbone. Nothing is written yet.
        """

    def objective(self, setting: Setting) -> Objective:
        """Return the objective, which also gives the held-out loss, with the model in eval mode.

        Called after `model`, when the run owns its folder: the main process may write a file of the method.
        """

    def step_rule(self, model: nn.Module) -> StepRule | None:
        """Return the step rule, in place of a plain step; None for that. Called after `objective`."""

    def draw(self, model: nn.Module, images: Tensor, setting: Setting) -> None:
        """Draw results into ``setting.out``, in the main process at the end of the run.

        Args:
            model: in eval mode, on its device.
            images: (B, C, H, W), a few held-out ones after ``plain``, on the device.
            setting: of the run.
        """

    def remarks(self, row: Mapping[str, float]) -> list[str]:
        """Return warnings about the last epoch, whose numbers are ``row``, one sentence each."""

    def numbers(self) -> dict[str, Any]:
        """Return the method's entries of the card and the result, as JSON values."""


def make_method(name: str) -> Method:
    """Return a new method by its name, which the config has checked."""
    module, _, kind = METHODS[name].partition(":")
    return cast(Method, getattr(importlib.import_module(module), kind)())
