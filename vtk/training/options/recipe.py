"""How a run trains: length, batches, optimiser, learning rate."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.training.options.checks import require


@dataclass(frozen=True)
class RecipeOptions:
    """Length, batches, optimiser and learning rate."""

    epochs: int = field(default=5, metadata={"help": "passes over the training images"})
    batch_size: int | Literal["auto"] = field(
        default=32,
        metadata={"help": "images per forward pass, all processes together; auto is the largest that memory allows"},
    )
    accumulate: int = field(default=1, metadata={"help": "forward passes per optimiser step"})
    optimizer: str = field(
        default="adamw",
        metadata={"help": "one of timm's, for instance adamw, sgd (Nesterov momentum), lamb, lion, adan, muon, nadamw"},
    )
    opt_kwargs: tuple[str, ...] = field(
        default=(),
        metadata={"help": "further arguments of the optimiser as key=value, such as eps=1e-6"},
    )
    lr: float = field(default=1e-4, metadata={"help": "highest learning rate (AdamW; sgd wants about 100 times more)"})
    layer_decay: float | None = field(
        default=None,
        metadata={
            "help": "factor on the learning rate from each layer to the one below it (0.65 to 0.9 is usual); default "
            "none"
        },
    )
    head_lr_mult: float = field(
        default=10.0,
        metadata={"help": "factor on the learning rate of the head, which starts from nothing"},
    )
    min_lr: float = field(default=0.0, metadata={"help": "learning rate at the end, as a fraction of the highest"})
    schedule: Literal["cosine", "linear"] = field(
        default="cosine", metadata={"help": "how the learning rate falls after its warm-up"}
    )
    warmup: float = field(
        default=0.1,
        metadata={"help": "share of all steps in which the learning rate rises linearly"},
    )
    weight_decay: float = field(
        default=0.05,
        metadata={"help": "of trained matrices; never of biases, norms and position tables"},
    )
    momentum: float = field(default=0.9, metadata={"help": "of optimisers that have one"})
    clip_grad: float = field(default=1.0, metadata={"help": "highest norm of the gradient, 0 for no limit"})
    ema: float | None = field(
        default=None,
        metadata={
            "help": "decay, such as 0.999, of a running average of the trained weights, which is then what is "
            "evaluated and packed; default none"
        },
    )

    def _check_recipe(self) -> None:
        for name in ("epochs", "batch_size", "accumulate"):
            value = getattr(self, name)
            if not (name == "batch_size" and value == "auto"):
                require(isinstance(value, int) and value >= 1, name, value, "at least 1")
        schedule: str = self.schedule
        require(schedule in ("cosine", "linear"), "schedule", schedule, "cosine or linear")
        for name in ("lr", "head_lr_mult"):
            require(0 < getattr(self, name) <= 1e6, name, getattr(self, name), "above 0, at most 1e6")
        require(self.weight_decay <= 1e6, "weight_decay", self.weight_decay, "0 or above, at most 1e6")
        for name in ("weight_decay", "clip_grad"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        for name in ("warmup", "momentum"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")
        layer_decay = self.layer_decay
        require(layer_decay is None or 0 < layer_decay <= 1, "layer_decay", layer_decay, "above 0 to 1")
        require(self.ema is None or 0 <= self.ema < 1, "ema", self.ema, "from 0 to below 1")
        require(0 <= self.min_lr <= 1, "min_lr", self.min_lr, "from 0 to 1")
