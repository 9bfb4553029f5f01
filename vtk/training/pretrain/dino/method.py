"""The method ``dino`` of `vtk.training.pretrain`: objective, step rule, checks, results."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.card import InputSpec
from vtk.data.loading.loader import Transform
from vtk.data.loading.train_pipeline import TrainTransform
from vtk.errors import UsageError
from vtk.models.arguments import parse_model_kwargs
from vtk.models.crop_sizes import check_runs
from vtk.models.inputs import patch_side
from vtk.models.task_parameters import feature_width
from vtk.training.engine.ema import Ema
from vtk.training.engine.gradients import Gradients
from vtk.training.engine.step_rule import StepRule
from vtk.training.objectives.base import Batch
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.dino.loss import Schedules, dino_loss
from vtk.training.pretrain.dino.model import DinoHead, DinoModel, without_noise
from vtk.training.pretrain.dino.teacher import Teacher
from vtk.training.pretrain.dino.views import WHOLE, Crops, multi_crop, small_size
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.similarity_plot import draw_similarity

STRENGTH = 0.4
"""Of the change of colours, without ``--color-jitter``."""
COLLAPSED = 0.01
"""Nats of divergence between targets and answers on held-out images, below which a run is warned of."""
_WITHOUT = 32  # px: crops of a model without patches have multiples of it


class SelfDistillation:
    """Cross-entropy between the teacher's targets of whole views and the student's answers to all other views.

    Args:
        setting: of the run.
    """

    teacher: Teacher

    def __init__(self, setting: Setting) -> None:
        self.config, self.ranks = setting.config, setting.ranks

    def average(self, tensors: Mapping[str, Tensor], steps: int) -> Ema:
        """Return the teacher, which starts with the student's weights."""
        config = self.config
        schedules = Schedules(
            steps, config.epochs, config.teacher_momentum, config.teacher_temp, config.teacher_temp_start,
            config.teacher_temp_epochs, config.freeze_prototypes,
        )  # fmt: skip
        self.teacher = Teacher(tensors, schedules, config.dino_prototypes, config.center_momentum, self.ranks)
        return self.teacher

    def start_epoch(self, seed: int) -> None:
        """Do nothing: views are drawn with the images."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss, the entropy of the targets and their divergence from the student, in nats."""
        inner: Any = getattr(model, "module", model)
        teacher = self.teacher
        if inner.training:
            teacher.begin()
        # the teacher first: in 16 bits the casts of the latest forward pass are those that the backward pass needs
        with torch.no_grad(), teacher.in_model(True), without_noise(inner):
            targets = inner(batch.images, whole_only=True)
        with teacher.in_model(False):
            outputs = model(batch.images)
        if inner.training:
            teacher.observe(targets)
        loss, entropy = dino_loss(
            outputs, targets, teacher.center, self.config.student_temp, teacher.temperature
        )  # fmt: skip
        return loss, {"teacher_entropy": entropy, "teacher_kl": (loss - entropy).detach()}


class FrozenPrototypes:
    """A plain step that leaves the prototypes as they are in the first epochs (Caron et al. 2021, appendix C).

    Args:
        objective: its teacher knows the step.
        prototypes: their parameters.
    """

    passes = 1

    def __init__(self, objective: SelfDistillation, prototypes: nn.Module) -> None:
        self.objective, self.parameters = objective, list(prototypes.parameters())

    def step(self, gradients: Gradients, update: Callable[[], None]) -> None:
        """Do one optimizer step; without a gradient, weight decay leaves a parameter alone as well."""
        gradients()
        if self.objective.teacher.frozen:
            for parameter in self.parameters:
                parameter.grad = None
        update()


class Dino:
    """The method. Held-out images have the same random views in every epoch; the backbone kept is the teacher's."""

    labelled = False
    crops: Crops
    config: PretrainConfig

    def check(self, backbone: nn.Module, config: PretrainConfig, spec: InputSpec) -> None:
        """Refuse a backbone without features, or one that does not take small crops.

        Raises:
            UsageError: the backbone, or the size of the crops, does not fit.
        """
        kwargs = parse_model_kwargs(config.model_kwargs)
        own = patch_side(config.model, kwargs)
        patch = own or min(_WITHOUT, *spec.size)
        given = config.local_size
        small = small_size(spec.size, patch) if given is None else (given, given) if isinstance(given, int) else given
        if own and any(side % own for side in small):
            raise UsageError(
                f"`--local-size` {small[0]} {small[1]} is not a multiple of the patch of {patch} px; give "
                f"{' '.join(str(max(1, round(side / patch)) * patch) for side in small)}"
            )
        if not getattr(backbone, "num_features", 0):
            raise UsageError(
                f"`--method dino` needs features, which {type(backbone).__name__} does not have; give another model"
            )
        self.config, self.crops = config, Crops(spec.in_chans, spec.size, small, config.local_crops)
        if self._other_size:
            check_runs(backbone, small, 3, self._hint)

    @property
    def _other_size(self) -> bool:
        return self.crops.count > 0 and self.crops.small != self.crops.size

    @property
    def _hint(self) -> str:
        height, width = self.crops.size
        return f"give --local-crops 0, or --local-size {height} {width} for crops of the whole input's size"

    def transforms(self, augment: Callable[..., TrainTransform], plain: Transform) -> tuple[Transform, Transform]:
        """Return the transform to all views, twice: held-out images draw theirs from a seed of their own."""
        low, high = self.config.local_scale
        strength = self._strength
        plain_augment = augment if strength is None else lambda **more: augment(**{"color_jitter": None, **more})
        views = multi_crop(plain_augment, self.crops, (low, high), strength)
        return views, views

    @property
    def _strength(self) -> float | None:
        """Of the change of colours; None where colours and sharpness stay."""
        if not self.config.dino_colors or self.crops.in_chans not in (1, 3):
            return None
        return STRENGTH if self.config.color_jitter is None else self.config.color_jitter

    def model(self, backbone: nn.Module, setting: Setting) -> nn.Module:
        """Return the backbone with a head; parameters that the loss does not reach are frozen."""
        config, width = setting.config, feature_width(backbone)
        if self._other_size:
            check_runs(backbone, self.crops.small, self.crops.in_chans, self._hint)
        head = DinoHead(
            width, config.dino_hidden, config.dino_bottleneck, config.dino_prototypes, unit=config.unit_prototypes
        )
        model = DinoModel(backbone, head, self.crops)
        unused = _freeze_unreached(model)
        if setting.ranks.main:
            self._tell(unused)
        return model

    def _tell(self, unused: list[str]) -> None:
        (height, width), (h, w), count = self.crops.size, self.crops.small, self.crops.count
        crops = f" and {count} crop{'s' * (count > 1)} of {h}×{w} px" if count else ""
        console.say(f"student: {WHOLE} views of {height}×{width} px{crops} of every image; teacher: the {WHOLE} views")
        if (strength := self._strength) is not None:
            change = (
                f"changed by up to {100 * strength:g} %; some views are grey, blurred or solarised (--no-dino-colors)"
            )
            console.say(f"colours of views are {change}")
        elif self.config.dino_colors:
            console.say(
                f"colours and sharpness of views stay: images of {self.crops.in_chans} channels have no colours"
            )
        if unused:
            console.say(f"{len(unused)} tensors get no gradient and are frozen: {', '.join(unused[:3])}")

    def objective(self, setting: Setting) -> SelfDistillation:
        """Return the loss of all pairs of views."""
        self._objective = SelfDistillation(setting)
        return self._objective

    def step_rule(self, model: nn.Module) -> StepRule | None:
        """Return the step that spares the prototypes at first."""
        prototypes: Any = model.projection.prototypes  # type: ignore[union-attr]
        return FrozenPrototypes(self._objective, prototypes)

    @torch.no_grad()
    def draw(self, model: nn.Module, images: Tensor, setting: Setting) -> None:
        """Draw the cosines between the features of held-out images."""
        inner: Any = model
        features = nn.functional.normalize(inner.backbone(images).float(), dim=1)
        draw_similarity(features, "cosine of the features", setting.out)

    def remarks(self, row: Mapping[str, float]) -> list[str]:
        """Return a warning if all images get the same answer: their targets then say nothing (section 5.3)."""
        if row.get("val_teacher_kl", 1.0) > COLLAPSED:
            return []
        return [
            "the outputs have collapsed: student and teacher give all images the same answer (val_teacher_kl "
            f"{row['val_teacher_kl']:.3f}); use a lower --lr, a higher --teacher-momentum or fewer --dino-prototypes"
        ]

    def numbers(self) -> dict[str, Any]:
        """Return the number of views, the size of the crops and the number of prototypes."""
        return {
            "views": [WHOLE, self.crops.count], "local_size": list(self.crops.small),
            "prototypes": self.config.dino_prototypes,
        }  # fmt: skip


def _freeze_unreached(model: DinoModel) -> list[str]:
    """Freeze parameters that the outputs do not depend on; return their names."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    images = torch.zeros(1, model.crops.in_chans, *model.crops.size)
    output = model.projection(model.backbone(images))
    for module, training in modes:
        module.training = training
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    reached = torch.autograd.grad(output.sum(), [p for _, p in named], allow_unused=True)
    unused = [name for (name, _), gradient in zip(named, reached, strict=True) if gradient is None]
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    return unused
