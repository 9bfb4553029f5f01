"""Distillation: the loss of the labels beside that of a trained teacher's outputs for the same images.

``soft``: T²·KL(teacher ‖ student) of probabilities at temperature T (Hinton et al., 2015, section 2). ``hard``: the
cross-entropy with the teacher's most likely class (Touvron et al., *DeiT*, 2021, eq. 3). ``features`` and ``tokens``:
‖student − teacher‖² ÷ ‖teacher‖², the mean over images, of the classifier's input or of all last tokens: without a
unit, so that models of any scale weigh alike. A student with two heads (DeiT's distillation token) learns the labels
with the one and the teacher's classes with the other; both are averaged when it is used, as timm does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk.models.task_parameters import head_names
from vtk.training.objectives.base import Batch, Objective, Stateful
from vtk.training.objectives.teacher import Tap, Teacher, check_widths
from vtk.training.objectives.trained import Trained, load_trained
from vtk.training.options.distill import LOGIT_KINDS, DistillKind

__all__ = [
    "Criterion", "Distillation", "Taught", "Teacher", "Trained", "describe_teacher", "distill", "load_trained",
    "open_teacher",
]  # fmt: skip


class Criterion(Objective, Protocol):
    """An objective that can judge logits which are already there."""

    def criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of logits (B, classes)."""


@dataclass(frozen=True)
class Taught(Batch):
    """Images with the teacher's output, computed once however often the step rule runs the batch."""

    answer: Tensor = field(default_factory=lambda: torch.empty(0))


class Distillation:
    """The loss of the labels and that of the teacher, (1 − alpha) : alpha.

    Args:
        inner: of the labels; None where there are none, which takes ``alpha`` 1.
        teacher: sees the images as the student does: after augmentation, mixed where they are mixed.
        student: the model that is trained.
        kind: what is matched.
        alpha: share of the teacher, in (0, 1].
        temperature: of ``soft``.
        multi_label: logits are independent decisions, each its own sigmoid.
        spec: the student's input, to compare the shapes of features beforehand.

    Raises:
        UsageError: the models' features cannot be compared.
    """

    static = True  # the teacher runs in `prepare`

    def __init__(
        self, inner: Criterion | None, teacher: Teacher, student: nn.Module, *, kind: DistillKind = "soft",
        alpha: float = 0.5, temperature: float = 1.0, multi_label: bool = False, spec: InputSpec | None = None,
    ) -> None:  # fmt: skip
        if inner is None and alpha != 1:
            raise ValueError(f"`alpha` is {alpha}; without labels the teacher is all there is: give 1")
        self.inner, self.teacher, self.kind = inner, teacher, kind
        self.alpha, self.temperature, self.multi_label = alpha, temperature, multi_label
        self._tap = None if kind in LOGIT_KINDS else Tap(student, kind)
        if self._tap is not None and spec is not None:
            check_widths(student, self._tap, teacher, spec, kind)
        two_heads: Any = getattr(student, "set_distilled_training", None)
        # both are averaged before the loss sees them where one of them would have nothing to learn from
        if two_heads is not None:
            two_heads(kind in LOGIT_KINDS and alpha < 1)

    def start_epoch(self, seed: int) -> None:
        """Seed the mixing of images."""
        if self.inner is not None:
            self.inner.start_epoch(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return where the mixing of images stands."""
        return self.inner.state_dict() if isinstance(self.inner, Stateful) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if isinstance(self.inner, Stateful):
            self.inner.load_state_dict(state)

    def prepare(self, batch: Batch) -> Taught:
        """Prepare the batch as the labels' objective does, and ask the teacher about the result."""
        if self.inner is not None:
            batch = self.inner.prepare(batch)
        return Taught(batch.images, batch.labels, batch.stream, self.teacher.answer(batch.images, self.kind))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss, and the two parts of it to log."""
        assert isinstance(batch, Taught)
        output = model(batch.images)
        logits, own = output if isinstance(output, tuple) else (output, output)
        student = own if self._tap is None else self._tap.take()
        wide = torch.promote_types(student.dtype, torch.float32)
        taught = self.match(student.to(wide), batch.answer.to(wide))
        numbers: dict[str, Tensor | float] = {"loss_teacher": taught.detach()}
        if self.kind in LOGIT_KINDS and not self.multi_label:
            numbers["agreement"] = (student.detach().argmax(1) == batch.answer.argmax(1)).float().mean()
        if self.inner is None:
            # nothing but the classifier's own input is judged: its weights must stay in the graph, which DDP asks for
            return self.alpha * taught + (0 * logits.sum() if self._tap is not None else 0), numbers
        labelled = self.inner.criterion(logits, batch)
        numbers["loss_labels"] = labelled.detach()
        return (1 - self.alpha) * labelled + self.alpha * taught, numbers

    def match(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return how far the student is from the teacher, in fp32 or wider: a scalar, 0 where they are equal.

        Args:
            student: logits (B, n), features (B, C) or tokens (B, N, C) of the student.
            teacher: of the teacher.
        """
        if self.kind in ("features", "tokens"):
            off = (student - teacher).flatten(1).square().sum(1)
            return (off / teacher.flatten(1).square().sum(1)).mean()
        if self.multi_label:
            return self._match_labels(student, teacher)
        if self.kind == "hard":
            return F.cross_entropy(student, teacher.argmax(1))
        t = self.temperature
        log_p, log_q = F.log_softmax(student / t, 1), F.log_softmax(teacher / t, 1)
        return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True) * t**2

    def _match_labels(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the mean over labels: each is a distribution over yes and no."""
        if self.kind == "hard":
            return F.binary_cross_entropy_with_logits(student, (teacher > 0).to(student.dtype))
        t = self.temperature
        share = torch.sigmoid(teacher / t)
        cross = F.binary_cross_entropy_with_logits(student / t, share)
        return (cross - F.binary_cross_entropy_with_logits(teacher / t, share)) * t**2


class Config(Protocol):
    """What this module reads of a config: its group of options, and whether images have any number of labels."""

    @property
    def distill_from(self) -> str | None: ...
    @property
    def distill_kind(self) -> DistillKind: ...
    @property
    def distill_alpha(self) -> float: ...
    @property
    def distill_temperature(self) -> float: ...
    @property
    def multi_label(self) -> bool: ...


def open_teacher(
    config: Config, classes: tuple[str, ...], student: InputSpec, device: torch.device, dtype: torch.dtype,
    trained: Trained | None = None,
) -> Teacher | None:  # fmt: skip
    """Return the teacher that ``--distill-from`` names, on the device; None without one.

    Args:
        config: of the run.
        classes: of the run's images.
        student: the input of the run's model.
        device: of the run.
        dtype: of the run's frozen weights.
        trained: a loaded teacher, in place of the one to be read.

    Raises:
        UsageError: it is no model, or one that cannot teach this run.
        DataError: it is damaged, or the base of a pack is missing.
    """
    if config.distill_from is None:
        return None
    teacher = Teacher(trained or load_trained(config.distill_from), student, device, dtype)
    if config.distill_kind in LOGIT_KINDS:
        teacher.check_classes(classes, config.multi_label)
    return teacher


def distill(
    inner: Criterion, teacher: Teacher, student: nn.Module, config: Config, spec: InputSpec, *, new_classifier: bool
) -> Distillation:
    """Return what a run with ``--distill-from`` minimises in place of ``inner``.

    Raises:
        UsageError: the models' features cannot be compared, nothing would train a new classifier, or nothing but the
            classifier is trained, which features do not see.
    """
    if (kind := config.distill_kind) not in LOGIT_KINDS:
        heads = head_names(student)
        if not any(p.requires_grad for name, p in student.named_parameters() if name not in heads):
            raise UsageError(
                f"`--distill-kind` {kind} compares what is below the classifier, and nothing there is trained; give "
                "another --train, or --distill-kind soft or hard"
            )
        if new_classifier and config.distill_alpha == 1:
            raise UsageError(
                f"`--distill-alpha` 1 with --distill-kind {kind} gives the new classifier nothing to learn from; give "
                "an alpha below 1, or --distill-kind soft or hard"
            )
    return Distillation(
        inner, teacher, student, kind=config.distill_kind, alpha=config.distill_alpha,
        temperature=config.distill_temperature, multi_label=config.multi_label, spec=spec,
    )  # fmt: skip


def describe_teacher(teacher: Teacher, config: Config) -> list[str]:
    """Return who teaches, how, and what is done to its images, for people."""
    kind, t = config.distill_kind, config.distill_temperature
    how = f"{kind}, alpha {config.distill_alpha:g}{f', temperature {t:g}' if kind == 'soft' else ''}"
    return [f"teacher {teacher.trained.name} ({teacher.card.model.name}, id {teacher.identity[:12]}): {how}",
            *teacher.notes]  # fmt: skip
