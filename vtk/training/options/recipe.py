"""Options of training: length, batches, optimizer, learning rate."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.training.recipes import check_name

Epochs = Annotated[int, Option("passes over the training images", "schedule", often=True, least=1)]
BatchSize = Annotated[
    int | Literal["auto"],
    Option("images per forward pass; auto: the largest that fits", "schedule", often=True, least=1),
]
FixedBatchSize = Annotated[int, Option("images per forward pass", "schedule", often=True, least=1)]
LearningRate = Annotated[
    float, Option("peak learning rate (SGD: about 100×)", "schedule", often=True, above=0, most=1e6)
]
OptKwargs = Annotated[
    tuple[str, ...],
    Option("further arguments of the optimizer, such as eps=1e-6", "schedule", pattern="(?s)[^=]+=.*",
           allowed="key=value, such as eps=1e-6"),
]  # fmt: skip
ClipGrad = Annotated[float, Option("gradient-norm clipping; 0 = off", "schedule", least=0)]
HeadMultiplier = Annotated[
    float, Option("learning-rate multiplier of the newly initialised head", "schedule", above=0, most=1e6)
]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Config):
    """Length, batches, optimizer and learning rate of any run."""

    GROUP: ClassVar[str] = "schedule"

    recipe: Annotated[
        str | None,
        Option("published recipe by name, or a .yaml file of defaults", often=True, nonempty=True),
    ] = None
    epochs: Epochs = 5
    batch_size: BatchSize = 32
    accumulate: Annotated[int, Option("forward passes per optimizer step", least=1)] = 1
    optimizer: Annotated[
        str, Option("timm optimizer: adamw, sgd (Nesterov), lamb, lion, adan, muon and others", nonempty=True)
    ] = "adamw"
    opt_kwargs: OptKwargs = ()
    lr: LearningRate = 1e-4
    min_lr: Annotated[float, Option("final learning rate, as a fraction of the peak", least=0, most=1)] = 0.0
    schedule: Annotated[
        Literal["cosine", "linear", "exponential"],
        Option("decay of the learning rate after warm-up; exponential needs --min-lr"),
    ] = "cosine"
    warmup: Annotated[float, Option("warm-up, as a fraction of all steps", least=0, below=1)] = 0.1
    weight_decay: Annotated[
        float,
        Option("weight decay (not applied to biases, norms, position embeddings)", often=True, least=0, most=1e6),
    ] = 0.05
    momentum: Annotated[float, Option("momentum, if the optimizer uses it", least=0, below=1)] = 0.9
    clip_grad: ClipGrad = 1.0
    ema: Annotated[
        float | None,
        Option("decay of the weights' moving average, such as 0.999, which is evaluated and packed", least=0, below=1),
    ] = None

    def _check_recipe(self) -> None:
        """Refuse a recipe that is not there, and an exponential decay without its end."""
        check_name(self.recipe, type(self))
        if self.schedule == "exponential" and not self.min_lr:
            raise UsageError("`--schedule exponential` falls by equal factors and never reaches 0; add --min-lr 0.01")


@dataclass(frozen=True, kw_only=True)
class LayerRateOptions(Config):
    """Learning rates of single layers, of runs that train a classifier."""

    GROUP: ClassVar[str] = "schedule"

    layer_decay: Annotated[
        float | None,
        Option("layer-wise learning-rate decay; 0.65 to 0.9 is usual (default: none)", least=0.001, most=1),
    ] = None
    head_lr_mult: HeadMultiplier = 10.0
