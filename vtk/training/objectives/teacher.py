"""The teacher of a distillation: a trained model that sees the student's images in its own normalisation and size."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.card import InputSpec
from vtk.data.decoding.rules import show_range
from vtk.data.loading.normalization import mean_and_std
from vtk.errors import UsageError
from vtk.training.objectives.trained import Trained, trained_id
from vtk.training.options.distill import LOGIT_KINDS, DistillKind


class Teacher:
    """A trained model in eval mode, without gradients, for images that are made for a student.

    Args:
        trained: the model; it is moved and rounded in place.
        student: how the images are normalised that it is given, and how large they are.
        device: where to compute.
        dtype: of its weights and of its input.

    Attributes:
        identity: sha256 of its weights and of all else that decides its answers.
        notes: what is done to the images, for people.

    Raises:
        UsageError: it takes images of other channels.
    """

    def __init__(
        self, trained: Trained, student: InputSpec, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        own = trained.card.input
        if own.in_chans != student.in_chans:
            raise UsageError(
                f"`--distill-from` {trained.name} takes images of {own.in_chans} channels, the student of "
                f"{student.in_chans}; give a teacher of {student.in_chans}"
            )
        self.trained, self.card, self.dtype = trained, trained.card, dtype
        self.identity = trained_id(trained)
        self.model = trained.model.eval().requires_grad_(False).to(device, dtype)
        self.notes: list[str] = []
        self._affine: tuple[Tensor, Tensor] | None = None
        if (own.mean, own.std) != (student.mean, student.std):
            # x·std + mean is the image in 0 to 1, whatever the augmentation did
            mean, std = mean_and_std(student, torch.float64)
            to_mean, to_std = mean_and_std(own, torch.float64)
            scale, shift = std / to_std, (mean - to_mean) / to_std
            self._affine = scale.float().to(device), shift.float().to(device)
            self.notes.append(f"images are renormalised for it (mean {_numbers(own.mean)}, std {_numbers(own.std)})")
        if own.value_range != student.value_range:
            ranges = (", ".join(map(show_range, spec.value_range[:3])) or "none" for spec in (own, student))
            self.notes.append("caution: its value range is {}, the images are mapped by {}".format(*ranges))
        self._size = None if own.size == student.size else own.size
        if self._size is not None:
            (h, w), (th, tw) = student.size, own.size
            self.notes.append(f"images are resampled for it, from {h}×{w} to {th}×{tw} px")
        self._tap: Tap | None = None

    def check_classes(self, classes: tuple[str, ...], multi_label: bool) -> None:
        """Refuse a teacher whose logits are not of these classes in this order.

        Raises:
            UsageError: names the first difference.
        """
        name, own = self.trained.name, self.card.classes
        other = "; --distill-kind features or tokens needs no classes of the teacher"
        if not self.trained.described:
            raise UsageError(f"`--distill-from` {name}: a timm name has no class names, so its logits cannot be "
                             f"compared{other}")  # fmt: skip
        if own != classes:
            if sorted(own) == sorted(classes):
                what = "the classes in another order"
            elif len(own) != len(classes):
                what = f"{len(own)} classes, the images have {len(classes)}"
            else:
                mine, theirs = next((a, b) for a, b in zip(classes, own, strict=True) if a != b)
                what = f"class `{theirs}` where the images have `{mine}`"
            raise UsageError(f"`--distill-from` {name} has {what}{other}")
        if self.card.multi_label != multi_label:
            kinds = "several labels an image" if self.card.multi_label else "one label an image"
            raise UsageError(f"`--distill-from` {name} was trained with {kinds}, this run is not{other}")

    @torch.no_grad()
    def answer(self, images: Tensor, kind: DistillKind) -> Tensor:
        """Return its logits (B, classes), its features (B, C) or its last tokens (B, N, C), in its own dtype.

        Args:
            images: (B, C, H, W) in the student's normalisation and size, after augmentation and mixing.
            kind: which of them.
        """
        if self._affine is not None:
            images = images * self._affine[0] + self._affine[1]
        if self._size is not None:
            images = F.interpolate(images, self._size, mode="bicubic", antialias=True, align_corners=False)
        if kind in LOGIT_KINDS:
            logits: Tensor = self.model(images.to(self.dtype))
            return logits
        if self._tap is None:
            self._tap = Tap(self.model, kind)
        self.model(images.to(self.dtype))
        return self._tap.take()


class Tap:
    """Keeps what a model hands on inside of a forward pass: the input of its classifier, or its last tokens.

    Args:
        model: a timm model.
        kind: ``features`` or ``tokens``.

    Raises:
        UsageError: the model has no such place.
    """

    def __init__(self, model: nn.Module, kind: DistillKind) -> None:
        self._value: Tensor | None = None
        config: Any = getattr(model, "pretrained_cfg", None) or {}
        if kind == "features":
            names = config.get("classifier") or "head"
            names = (names,) if isinstance(names, str) else tuple(names)
            module = _module(model, names[-1])  # of two heads the last is the one that learns from a teacher
            if module is not None:
                module.register_forward_pre_hook(lambda _, args: self._keep(args[0]))
        else:
            module = _module(model, "norm")
            if module is not None:
                module.register_forward_hook(lambda _, args, output: self._keep(output))
        if module is None:
            where = "classifier" if kind == "features" else "final norm over tokens"
            raise UsageError(f"`--distill-kind` {kind}: {type(model).__name__} has no {where}; choose soft or hard")

    def _keep(self, value: Tensor) -> None:
        self._value = value

    def take(self) -> Tensor:
        """Return what the latest forward pass handed on."""
        assert self._value is not None
        value, self._value = self._value, None
        return value


@torch.no_grad()
def check_widths(student: nn.Module, tap: Tap, teacher: Teacher, spec: InputSpec, kind: DistillKind) -> None:
    """Refuse features that cannot be compared, before anything is trained: one black image goes through both models.

    Raises:
        UsageError: names both shapes.
    """
    first = next(student.parameters())
    image = torch.zeros(1, spec.in_chans, *spec.size, device=first.device)
    training = [m for m in student.modules() if m.training]
    student.eval()
    student(image.to(first.dtype))
    for module in training:
        module.training = True
    mine, theirs = tuple(tap.take().shape[1:]), tuple(teacher.answer(image.to(_device(teacher.model)), kind).shape[1:])
    if mine != theirs:
        raise UsageError(
            f"`--distill-kind` {kind}: the student has {_shape(mine)}, {teacher.trained.name} {_shape(theirs)}; give a "
            "teacher of the same width (of tokens, also of as many), or --distill-kind soft"
        )


def _shape(shape: tuple[int, ...]) -> str:
    return f"features of width {shape[0]}" if len(shape) == 1 else f"tokens {' × '.join(map(str, shape))}"


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{v:.3g}" for v in values)
