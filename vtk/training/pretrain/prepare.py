"""Prepares a pre-training run: checks its options, reads its images, builds the backbone and the model to train."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vtk import console
from vtk.card import InputSpec, Transform
from vtk.data.audit.result import DataAudit
from vtk.data.loading import loader
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.samplers import mix
from vtk.data.loading.train_pipeline import train_transform
from vtk.data.mirroring import USUAL, Mirroring
from vtk.models.arguments import parse_model_kwargs
from vtk.models.create import Created, build_model, check_transforms
from vtk.models.initialization.draw import decided_kinds, describe_init, initial_weights
from vtk.models.inputs import blank_model, input_spec, patch_side
from vtk.training.engine.compile_passes import check_compile
from vtk.training.engine.optimizers import check_optimizer
from vtk.training.engine.precision import Precision, make_precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.step_plan import plan_steps, planned_epochs
from vtk.training.engine.streams import ImageStream, Stream
from vtk.training.policies import policy
from vtk.training.pretrain import outputs
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.feature_probe import FeatureProbe, make_probe
from vtk.training.pretrain.images import read_images
from vtk.training.pretrain.method import Method, Setting, make_method
from vtk.training.pretrain.seeds import SeededStream, number_images
from vtk.training.runs.identity import decoding_of, init_of
from vtk.training.runs.limit import limit_images
from vtk.training.runs.resume_state import Saved
from vtk.training.runs.scoring import default_workers
from vtk.training.runs.tracking import check_trackers
from vtk.training.runs.train_share import keep_share
from vtk.training.runs.views import resolve_mirroring, warn_of_enlarging
from vtk.training.step_rules.sam import Ascent
from vtk.training.step_rules.sharpness import make_step_rule

_MODEL = 0x4D
"""Mixed into the seed of what a method adds to the backbone."""


@dataclass(frozen=True)
class Plan:
    """What is known of a run before an image is read.

    Attributes:
        config: resolved, and checked against the model.
        ranks: this process and the others.
        method: of the run.
        model_kwargs: arguments of the backbone.
        spec: of its input.
        precision: of training.
    """

    config: PretrainConfig
    ranks: Ranks
    method: Method
    model_kwargs: dict[str, Any]
    spec: InputSpec
    precision: Precision

    def views(self, spec: InputSpec, mirroring: Mirroring) -> tuple[loader.Transform, loader.Transform]:
        """Return what makes tensors of images to train on, and of held-out ones."""
        config = self.config
        assert config.crop_scale is not None
        low, high = config.crop_scale
        usual: dict[str, Any] = {
            "spec": spec, "crop_scale": (low, high), "hflip": mirroring.probability,
            "auto_augment": config.auto_augment, "color_jitter": config.color_jitter,
        }  # fmt: skip
        return self.method.transforms(lambda **changes: train_transform(**{**usual, **changes}), eval_transform(spec))


def make_plan(config: PretrainConfig, ranks: Ranks) -> Plan:
    """Check all that can be checked before an image is read.

    Raises:
        UsageError: options that do not go with the model, the method or this machine.
    """
    kwargs = parse_model_kwargs(config.model_kwargs)
    spec = input_spec(
        config.model, kwargs, config.img_size, config.in_chans, mean=config.mean, std=config.std,
        interpolation=config.interpolation, crop_pct=config.crop_pct, resize_mode=config.resize_mode,
    )  # fmt: skip
    stem = () if config.in_chans == 3 else (Transform("adapt_input", {"in_chans": config.in_chans}),)
    check_transforms(config.model, (*stem, *config.transforms()), kwargs, spec.size)
    check_compile(config.compile)
    check_trackers(config.track)
    plan = Plan(config, ranks, make_method(config.method), kwargs, spec, make_precision(config.precision, ranks.device))
    check_optimizer(config.optimizer, config.opt_kwargs)
    plan.method.check(blank_model(config.model, kwargs), config, spec)
    plan.views(spec, Mirroring(USUAL if config.hflip is None else config.hflip, ""))
    return plan


@dataclass(frozen=True)
class Inputs:
    """The images and the backbone of a run.

    Attributes:
        audit: of the images.
        spec: of the input, with the decoding of these images.
        mirroring: of training images.
        views: what makes tensors of images to train on, and of held-out ones.
        created: the backbone.
        workers: processes that load images, for each training process.
        stream: of training batches.
        epochs: how many the run will have.
        probe: scores the features; None for none.
    """

    audit: DataAudit
    spec: InputSpec
    mirroring: Mirroring
    views: tuple[loader.Transform, loader.Transform]
    created: Created
    workers: int
    stream: Stream
    epochs: int
    probe: FeatureProbe | None


def read_inputs(plan: Plan, saved: Saved | None) -> Inputs:
    """Read the images and build the backbone.

    Args:
        plan: of the run.
        saved: state of the run that is resumed; None for a new one.

    Raises:
        DataError: the images or the weights cannot be used, or ``--probe on`` finds no classes.
        UsageError: the batch size does not fit the images.
    """
    config, ranks, method = plan.config, plan.ranks, plan.method
    resumed = saved.identity["flags"] if saved else {}
    for turn in (True, False):  # the main process scans first; the others find its cache
        if ranks.main == turn:
            audit = read_images(
                config, plan.spec, labelled=method.labelled, show_progress=ranks.main, decoding=decoding_of(saved)
            )
            audit = limit_images(keep_share(audit, config.train_share, config.seed), config.limit, config.seed)
        ranks.wait()
    spec = audit.decoding.applied(plan.spec)
    if ranks.main:
        warn_of_enlarging(audit, spec, patch_side(config.model, plan.model_kwargs))
    mirroring = resolve_mirroring(config.hflip, resumed.get("hflip"), audit, config.in_chans)
    views = plan.views(spec, mirroring)
    created = build_model(
        config.model, num_classes=0, img_size=config.img_size, weights=config.weights, pretrained=config.pretrained,
        seed=config.seed, drop_path_rate=config.drop_path, kwargs=plan.model_kwargs, in_chans=config.in_chans,
        input=spec, transforms=config.transforms(), init=init_of(saved) or config.init,
    )  # fmt: skip
    workers = default_workers(config.workers, ranks.world)
    stream: Stream = ImageStream(
        audit.train if method.labelled else number_images(audit.train), views[0], batch_size=config.batch_size,
        seed=config.seed, workers=workers, ranks=ranks, max_pixels=config.max_pixels,
    )  # fmt: skip
    if not method.labelled:
        stream = SeededStream(stream, config.seed)
    # a batch size that does not fit is refused here, before anything is written
    steps = len(plan_steps([stream.sizes], config.accumulate))
    epochs = planned_epochs(config.epochs, steps, config.max_steps)
    probe = make_probe(config, audit, eval_transform(spec), workers, ranks)
    return Inputs(audit, spec, mirroring, views, created, workers, stream, epochs, probe)


@dataclass(frozen=True)
class Trainee:
    """The model to train.

    Attributes:
        setting: what its method may know of the run.
        model: holds the backbone as ``backbone``.
        trained: names of the tensors that training changes.
        rule: how a step is taken.
        rule_line: one line about the rule; empty for the plain one.
        init_line: one line about the initial weights; None where their scheme decides nothing.
    """

    setting: Setting
    model: nn.Module
    trained: frozenset[str]
    rule: Ascent | None
    rule_line: str
    init_line: str | None


def make_trainee(plan: Plan, inputs: Inputs, out: Path) -> Trainee:
    """Build the model to train; BEiT trains its tokenizer here."""
    config, ranks = plan.config, plan.ranks
    if ranks.main:
        outputs.print_images(inputs.audit)
        for note in inputs.created.notes:
            console.say(note)
    setting = Setting(config, inputs.spec, ranks, out, inputs.audit, inputs.workers)
    torch.manual_seed(mix(config.seed, _MODEL))
    with initial_weights(inputs.created.init) as drawn:
        model = plan.method.model(inputs.created.model, setting)
    parameters = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    live = policy.live_buffers(model) & model.state_dict().keys()
    kind = getattr(plan.method, "kind", None)  # of the table of radii
    rule, rule_line = make_step_rule(config, inputs.created.model, [inputs.spec], ranks, kind)
    decided = (*inputs.created.decided, *decided_kinds(drawn, list(model.parameters())))
    init_line = describe_init(inputs.created.init, decided)
    return Trainee(setting, model, policy.aliases(model, parameters) | live, rule, rule_line, init_line)
