"""One task of a run: its images, its model on the base weights, and the parameters that are trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vtk.card import InitName
from vtk.data.audit.result import DataAudit
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.train_pipeline import TrainTransform
from vtk.data.mirroring import Mirroring
from vtk.data.record import Record, record_of
from vtk.errors import DataError
from vtk.models.create import Created, build_model
from vtk.models.devices import DTYPES
from vtk.models.inputs import patch_side
from vtk.models.task_parameters import head_names
from vtk.models.weights.base import Base
from vtk.models.weights.class_names import match_rows
from vtk.packs.lora_adapter import Lora
from vtk.training.objectives.distillation import open_teacher
from vtk.training.objectives.teacher import Teacher
from vtk.training.objectives.trained import Trained
from vtk.training.options.policy import PolicyOptions
from vtk.training.options.scratch import ScratchOptions
from vtk.training.options.task_spec import parse_starts
from vtk.training.policies import lora_layers as lora
from vtk.training.policies import policy
from vtk.training.policies.census import Census, take_census
from vtk.training.runs.init_from import describe_overlap, init_from_pack
from vtk.training.runs.label_kinds import read_data
from vtk.training.runs.limit import limit_images
from vtk.training.runs.plan import RunPlan, augmentation
from vtk.training.runs.scratch import apply_scratch
from vtk.training.runs.train_share import keep_share
from vtk.training.runs.views import resolve_mirroring, warn_of_enlarging


@dataclass(frozen=True)
class Task:
    """One task, ready to be given memory and batches.

    Attributes:
        plan: of the run.
        audit: the images.
        images: which of them are trained on and which held out, for the card.
        mirroring: probability of mirroring, and why.
        augment: random transform of training images.
        teacher: of ``--distill-from``; None without one.
        created: the model, and where its tensors came from.
        lora: layers with LoRA; None without.
        trained: state-dict keys that training may change.
        census: numbers of trained and frozen weights.
    """

    plan: RunPlan
    audit: DataAudit
    images: Record
    mirroring: Mirroring
    augment: TrainTransform
    teacher: Teacher | None
    created: Created
    lora: Lora | None
    trained: frozenset[str]
    census: Census

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.created.model

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        image = self.created.input
        return image.in_chans, image.height, image.width

    @property
    def new_classifier(self) -> bool:
        """Whether the classifier starts from random numbers: from neither the weights nor the pack of --init-from."""
        config, created, state = self.plan.config, self.created, self.model.state_dict()
        new = head_names(self.model) & created.initial.keys()
        if config.weights is not None or config.pretrained:
            known = created.base.classes
            stored = not head_names(self.model).isdisjoint(created.base.tensors)
            if known and stored and match_rows(known, self.audit.classes) is not None:  # rows of theirs, by name
                return False
            new = frozenset(name for name in new if created.key_map.get(name) is None)
        return any(torch.equal(state[name].float().cpu(), created.initial[name]) for name in new)


def build_task(
    plan: RunPlan, *, decoding: Decoding | None = None, hflip: object = None, base: Base | None = None,
    teacher: Trained | None = None, init: InitName | None = None,
) -> Task:  # fmt: skip
    """Read the images, make the model, and choose the parameters to train.

    Args:
        plan: of the run.
        decoding: rules of a resumed run of version 0.1.
        hflip: probability of mirroring in the run that is resumed; anything else than a number where there is none.
        base: weights already read, of an earlier task; by default the options say where they are.
        init: scheme of the initial weights of the run that is resumed; by default that of the options.
        teacher: a loaded model, in place of what ``--distill-from`` names.

    Raises:
        UsageError: options that do not fit the model or the images.
        DataError: the images or the weights cannot be used.
    """
    config, choice, ranks = plan.config, plan.choice, plan.ranks
    audit = _scan(plan, decoding)
    spec = audit.decoding.applied(plan.spec)
    images = record_of(audit)
    if ranks.main:
        warn_of_enlarging(audit, spec, patch_side(choice.name, choice.kwargs), plan.title)
    mirroring = resolve_mirroring(config.hflip, hflip, audit, config.in_chans)
    augment = augmentation(config, spec, mirroring.probability)
    taught_by = open_teacher(config, audit.classes, spec, ranks.device, DTYPES[plan.precision.name], teacher)
    created = build_model(
        choice.name, num_classes=len(audit.classes), img_size=choice.size, weights=config.weights,
        pretrained=config.pretrained, seed=config.seed, drop_path_rate=config.drop_path, kwargs=choice.kwargs,
        in_chans=config.in_chans, input=spec, transforms=config.transforms(), base=base, classes=audit.classes,
        init=init or config.init,
    )  # fmt: skip
    created.notes += [choice.note] if choice.note else []
    layers, parameters = _choose_parameters(plan, created)
    model: Any = created.model
    keys = policy.aliases(model, parameters) | (policy.live_buffers(model) & model.state_dict().keys())
    census = take_census(model, parameters, config.train)
    if choice.card is not None:
        created.notes += describe_overlap(choice.card, audit, f"`--weights` {config.weights}")
    for pack in parse_starts(config.init_from, ()).values():
        created.notes += init_from_pack(pack, created, audit, parameters, config.weights)
    task = Task(plan, audit, images, mirroring, augment, taught_by, created, layers, keys, census)
    if isinstance(config, ScratchOptions):
        apply_scratch(config, model, new_classifier=task.new_classifier)
    return task


def _choose_parameters(plan: RunPlan, created: Created) -> tuple[Lora | None, frozenset[str]]:
    """Return the LoRA layers, if any, and the names of the parameters that the policy trains."""
    config, layers = plan.config, None
    new: frozenset[str] = frozenset()
    if created.transforms:  # without one, a tensor that the base lacks is the model's own
        new = policy.created_names(created.key_map, created.model) - created.brought
    if isinstance(config, PolicyOptions) and config.train == "lora":
        layers = lora.inject(created, config, new, seed=plan.config.seed)
    parameters = policy.select(created.model, config.train, new)
    policy.apply(created.model, parameters)
    return layers, parameters


def _scan(plan: RunPlan, decoding: Decoding | None) -> DataAudit:
    config, ranks = plan.config, plan.ranks
    assert config.data is not None
    for turn in (True, False):  # the main process scans first; the others find its cache
        if ranks.main == turn:
            audit = read_data(config, plan.spec, show_progress=ranks.main, decoding=decoding)
            audit = limit_images(keep_share(audit, config.train_share, config.seed), config.limit, config.seed)
        ranks.wait()
    if not audit.val:
        raise DataError(
            f"{config.data} has no held-out images to choose the best epoch by; give it a val/ folder, or "
            "at least two images of a class"
        )
    return audit
