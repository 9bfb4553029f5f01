"""What a run trains, on what, and how: from flags to images, a model on its base, and what is trained of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vtk.card import Transform
from vtk.data.audit.scan import DataAudit
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.eval_transform import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.loading.train_transform import TrainTransform, train_transform
from vtk.data.mirroring import USUAL, Mirroring
from vtk.data.record import record_of
from vtk.data.sources.layout import refuse_inside
from vtk.errors import DataError
from vtk.models.create import build_model, check_transforms
from vtk.models.devices import DTYPES
from vtk.models.inputs import input_spec, patch_side
from vtk.models.task_parameters import head_names
from vtk.models.weights.base import Base
from vtk.models.weights.class_names import match_rows
from vtk.packs.lora_adapter import Lora
from vtk.training.engine.callbacks import Callbacks
from vtk.training.engine.compile_passes import check_compile
from vtk.training.engine.optimizers import check_optimizer
from vtk.training.engine.precision import make_precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.static_step.rules import check_graph
from vtk.training.engine.step_plan import plan_steps, planned_epochs
from vtk.training.engine.step_rule import StepRule
from vtk.training.engine.streams import ImageStream
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.memory import MemoryChoice, Subject, choose_memory
from vtk.training.objectives.base import Objective
from vtk.training.objectives.distillation import Teacher, Trained, describe_teacher, distill, open_teacher
from vtk.training.options.task_spec import parse_starts
from vtk.training.policies import lora_layers as lora
from vtk.training.policies import policy
from vtk.training.policies.census import take_census
from vtk.training.runs import outputs
from vtk.training.runs import resume_state as checkpoint
from vtk.training.runs.label_kinds import describe, make_objective, make_sampler, read_data
from vtk.training.runs.limit import limited
from vtk.training.runs.start_checkpoint import read_start
from vtk.training.runs.start_pack import start_from, tell_trained
from vtk.training.runs.tracking import check_trackers
from vtk.training.runs.view_lines import describe_views, settle_mirroring, warn_of_enlarging
from vtk.training.step_rules.sharpness import make_step_rule
from vtk.training.train_config import RunConfig


class Setup:
    """The means of one task's run; `vtk.training.runs.run.Run` uses them.

    Args:
        config: of this task.
        out: its folder.
        ranks: this process and the others.
        base: weights already read, of an earlier task; by default the config says where they are.
        title: put before what is said of it.

    Attributes:
        audit: the images, after `build`.
        images: which of them are trained on and which held out, for the card, after `build`.
        created: the model and where its tensors came from, after `build`.
        trained: state-dict keys that training may change, after `build`.
        memory: mode and batch, after `settle` or `take`.
        stream: the images to train on, after `feed`.
        labelled: what is minimised of the labels, after `feed`.
        objective: the same with the teacher, if there is one.
        best: the best epoch so far.
        rows: numbers of every epoch.
        callbacks: told of steps, epochs and files, in the main process.
        planned: epochs of the run, after `feed`.
    """

    def __init__(self, config: RunConfig, out: Path, ranks: Ranks, base: Base | None = None, title: str = "") -> None:
        self.config, self.out, self.ranks, self.base, self.title = config, out, ranks, base, title
        self.command = outputs.command_line(config)
        self.lora: Lora | None = None
        self.best: dict[str, Any] = {}
        self.identity: dict[str, Any] = {}
        self.rows: list[dict[str, float]] = []
        self.callbacks = Callbacks()
        self.decoding: Decoding | None = None  # of a run of version 0.1 that is resumed
        self.before: Mapping[str, Any] = {}  # flags of the run that is resumed
        self.mirroring = Mirroring(USUAL if config.hflip is None else config.hflip, "")
        self.stopped = False  # whether one of them ended the run
        self.planned = config.epochs
        self.trained_teacher: Trained | None = None  # one at hand, in place of what --distill-from names
        self.teacher: Teacher | None = None

    def load(self) -> checkpoint.Saved | None:
        """Check what can be checked before an image is read, and return the state of the run that is resumed."""
        config = self.config
        self.begin = begin = read_start(config)
        # a size that cannot be is refused before any image is read
        self.spec = input_spec(begin.name, begin.kwargs, begin.size, config.in_chans, **begin.input)
        stem = () if config.in_chans == 3 else (Transform("adapt_input", {"in_chans": config.in_chans}),)
        check_transforms(begin.name, (*stem, *config.transforms()), begin.kwargs, self.spec.size)
        self.precision = make_precision(config.precision, self.ranks.device, train=not config.dry_run)
        check_optimizer(config.optimizer, config.opt_kwargs)
        check_trackers(config.track)
        check_compile(config.compile)
        if not config.dry_run:
            check_graph(
                config, self.ranks.device, self.ranks.world, precision=self.precision.name,
                passes=1 if config.sam is None and config.adversarial is None else 2,
            )  # fmt: skip
        if config.data is not None and not config.dry_run:
            refuse_inside(self.out, config.data)
        self.augment = self.transform()
        saved = checkpoint.load_state(self.out / outputs.LAST) if config.resume else None
        self.decoding = checkpoint.decoding_of(saved)
        return saved

    def transform(self, **further: Any) -> TrainTransform:
        """Return what training images go through."""
        config, (low, high) = self.config, self.config.crop_scale
        return train_transform(
            self.spec, crop_scale=(low, high), hflip=self.mirroring.probability, auto_augment=config.auto_augment,
            color_jitter=config.color_jitter, reprob=config.reprob, **further,
        )  # fmt: skip

    def build(self) -> None:
        """Read the data, make the model, and choose what is trained."""
        config, begin = self.config, self.begin
        self.audit = self._scan()
        self.spec = self.audit.decoding.applied(self.spec)
        self.images = record_of(self.audit)
        self._choose_views()
        self.teacher = open_teacher(
            config, self.audit.classes, self.spec, self.ranks.device, DTYPES[self.precision.name], self.trained_teacher
        )
        self.created = build_model(
            begin.name, num_classes=len(self.audit.classes), img_size=begin.size, weights=config.weights,
            pretrained=config.pretrained, seed=config.seed, drop_path_rate=config.drop_path, kwargs=begin.kwargs,
            in_chans=config.in_chans, input=self.spec, transforms=config.transforms(), base=self.base,
            classes=self.audit.classes,
        )  # fmt: skip
        self.created.notes += [begin.note] if begin.note else []
        self.model = self.created.model
        made: frozenset[str] = frozenset()
        if self.created.transforms:  # without one, a tensor that the base lacks is the model's own
            made = policy.created_names(self.created.key_map, self.model) - self.created.brought
        if isinstance(config, FinetuneConfig) and config.train == "lora":
            self.lora = lora.inject(self.created, config, made)
        trained = policy.select(self.model, config.train, made)
        policy.apply(self.model, trained)
        self.trained = policy.aliases(self.model, trained) | (
            policy.live_buffers(self.model) & self.model.state_dict().keys()
        )
        self.census = take_census(self.model, trained, config.train)
        if begin.card is not None:
            self.created.notes += tell_trained(begin.card, self.audit, f"`--weights` {config.weights}")
        for pack in parse_starts(config.init_from, ()).values():
            self.created.notes += start_from(pack, self.created, self.audit, trained, config.weights)

    def _choose_views(self) -> None:
        """Choose whether images are mirrored, where no flag says it; a resumed run does as it did."""
        if self.ranks.main:
            warn_of_enlarging(self.audit, self.spec, patch_side(self.begin.name, self.begin.kwargs), self.title)
        self.mirroring = settle_mirroring(self.config.hflip, self.before.get("hflip"), self.audit, self.config.in_chans)
        self.augment = self.transform()

    def settle(self, saved: checkpoint.Saved | None) -> None:
        """Choose the memory mode, and the batch where it is to be chosen."""
        config = self.config
        choice = choose_memory(
            [Subject(self.model, self.image_size)], config, self.precision.name, self.ranks,
            images=len(self.audit.train), saved=saved.identity["flags"] if saved else None, count_all=config.dry_run,
        )  # fmt: skip
        self.take(choice)

    def take(self, memory: MemoryChoice) -> None:
        """Go on with this memory mode and batch."""
        self.memory = memory
        self.config = self.config.settled(memory.mode, memory.batch)
        self.rule, self.rule_line = make_step_rule(self.config, self.model, [self.created.input], self.ranks)

    def _scan(self) -> DataAudit:
        config, ranks = self.config, self.ranks
        assert config.data is not None
        for turn in (True, False):  # the main process scans first; the others find its cache
            if ranks.main == turn:
                audit = read_data(config, self.spec, show_progress=ranks.main, decoding=self.decoding)
                audit = limited(audit, config.limit, config.seed)
            ranks.wait()
        if not audit.val:
            raise DataError(
                f"{config.data} has no held-out images to choose the best epoch by; give it a val/ folder, or "
                "at least two images of a class"
            )
        return audit

    def step_rule(self) -> StepRule | None:
        """Return how gradients become an update; None for a plain step."""
        return self.rule

    def make_identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one it goes on with."""
        found = checkpoint.identity(
            self.config, base_id=self.created.base.ref.id, audit=self.audit, precision=self.precision.name,
            world=self.ranks.world,
        )  # fmt: skip
        found["flags"]["hflip"] = self.mirroring.probability
        if self.teacher is not None:  # it may have moved
            found["flags"]["distill_from"] = self.teacher.identity
        return found

    @property
    def new_classifier(self) -> bool:
        """Whether the classifier starts from random numbers: from neither the weights nor the pack of --init-from."""
        config, created, state = self.config, self.created, self.model.state_dict()
        new = head_names(self.model) & created.initial.keys()
        if config.weights is not None or config.pretrained:
            known = created.base.classes
            there = not head_names(self.model).isdisjoint(created.base.tensors)
            if known and there and match_rows(known, self.audit.classes) is not None:  # rows of theirs, by name
                return False
            new = frozenset(name for name in new if created.key_map.get(name) is None)
        return any(torch.equal(state[name].float().cpu(), created.initial[name]) for name in new)

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        image = self.created.input
        return image.in_chans, image.height, image.width

    def feed(self, workers: int) -> None:
        """Open the images, with so many loading processes, and make what is minimised; nothing is written yet."""
        config = self.config
        self.val_loader = make_loader(
            self.audit.val, eval_transform(self.created.input), batch_size=config.eval_batch_size, shuffle=False,
            seed=config.seed, workers=workers, max_pixels=config.max_pixels,
        )  # fmt: skip
        self.stream = ImageStream(
            self.audit.train, self.augment, batch_size=self.memory.batch, seed=config.seed, workers=workers,
            ranks=self.ranks, max_pixels=config.max_pixels, sampler=make_sampler(config, self.audit),
        )  # fmt: skip
        steps = len(plan_steps([self.stream.sizes], config.accumulate))
        self.planned = planned_epochs(config.epochs, steps, config.max_steps)
        self.labelled = make_objective(config, self.audit)
        self.objective: Objective = self.labelled
        if self.teacher is not None:
            self.objective = distill(
                self.labelled, self.teacher, self.model, config, self.created.input, new_classifier=self.new_classifier
            )

    def describe_feed(self) -> list[str]:
        """Return what is done to images and about classes of unequal size, and who teaches, for people."""
        lines = [describe_views(self.config, self.mirroring), *describe(self.config, self.labelled, self.audit)]
        return lines + (describe_teacher(self.teacher, self.config) if self.teacher is not None else [])
