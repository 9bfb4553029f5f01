"""Plans a run from its options: the model, its input and its precision, checked before an image is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtk.card import InputSpec, ModelSpec, Transform
from vtk.data.loading.train_pipeline import TrainTransform, train_transform
from vtk.data.mirroring import USUAL
from vtk.data.sources.layout import refuse_inside
from vtk.errors import UsageError
from vtk.models.create import check_transforms
from vtk.models.inputs import blank_model, input_spec
from vtk.models.stems.own import without_own_stem
from vtk.training.engine.compile_passes import check_compile
from vtk.training.engine.optimizers import check_optimizer
from vtk.training.engine.precision import Precision, make_precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.static_step.rules import check_graph
from vtk.training.options.scratch import ScratchOptions
from vtk.training.policies.lora_layers import refuse_own
from vtk.training.run_config import RunConfig
from vtk.training.runs.command_line import command_line
from vtk.training.runs.tracking import check_trackers
from vtk.training.runs.weights_card import ModelChoice, choose_model


@dataclass(frozen=True)
class RunPlan:
    """One task's run as its options describe it.

    Attributes:
        config: options of the task, as given.
        out: folder of the run.
        ranks: this process and the others.
        choice: model, from the options and the card of ``--weights``.
        spec: input of the model.
        precision: number formats.
        title: prefix of the printed lines, in a run of several tasks.
        command: command line, for the cards.
    """

    config: RunConfig
    out: Path
    ranks: Ranks
    choice: ModelChoice
    spec: InputSpec
    precision: Precision
    title: str
    command: str


def run_folder(config: RunConfig) -> Path:
    """Return the folder of a run of one task.

    Raises:
        UsageError: there are no images.
    """
    if config.data is None:
        if config.tasks:
            raise UsageError("`finetune` trains one task; call finetune_tasks for several")
        raise UsageError("no data: give a folder with train/ and val/, or with one folder per class")
    return config.out or Path("runs") / config.data.resolve().name


def plan_run(config: RunConfig, out: Path, ranks: Ranks, *, title: str = "", command: str | None = None) -> RunPlan:
    """Return the plan of a run; all that can be checked without reading an image is checked.

    Args:
        config: options of the task.
        out: folder of the run.
        ranks: this process and the others.
        title: prefix of the printed lines.
        command: command line of a run of several tasks; by default that of ``config``.

    Raises:
        UsageError: an option that cannot be.
        DataError: weights that cannot be read, or an output folder inside the images.
        UnavailableError: a device or a package that is missing.
    """
    choice = choose_model(config)
    spec = input_spec(choice.name, choice.kwargs, choice.size, config.in_chans, **choice.input)
    stem = () if config.in_chans == 3 else (Transform("adapt_input", {"in_chans": config.in_chans}),)
    check_transforms(choice.name, (*stem, *config.transforms()), choice.kwargs, spec.size)
    if config.train == "lora":
        own = () if choice.card is None else choice.card.transforms
        new = without_own_stem(blank_model(choice.name, choice.kwargs), config.transforms())
        refuse_own(ModelSpec(choice.name, choice.kwargs), spec, (*own, *new))
    precision = make_precision(config.precision, ranks.device, train=not config.dry_run)
    check_optimizer(config.optimizer, config.opt_kwargs)
    check_trackers(config.track)
    check_compile(config.compile)
    if not config.dry_run:
        check_graph(
            config, ranks.device, ranks.world, precision=precision.name,
            passes=1 if config.sam is None and config.adversarial is None else 2,
        )  # fmt: skip
    if config.data is not None and not config.dry_run:
        refuse_inside(out, config.data)
    augmentation(config, spec, USUAL if config.hflip is None else config.hflip)  # refuses what timm cannot read
    return RunPlan(config, out, ranks, choice, spec, precision, title, command or command_line(config))


def augmentation(config: RunConfig, spec: InputSpec, hflip: float) -> TrainTransform:
    """Return the random transform of training images.

    Args:
        config: options of the run.
        spec: input of the model.
        hflip: probability of mirroring.
    """
    low, high = config.crop_scale
    further: dict[str, Any] = {}
    if isinstance(config, ScratchOptions):
        further = {"remode": config.remode, "crop_pad": config.crop_pad}
    return train_transform(
        spec, crop_scale=(low, high), hflip=hflip, auto_augment=config.auto_augment, color_jitter=config.color_jitter,
        reprob=config.reprob, **further,
    )  # fmt: skip
