"""``vtk parallelize``: a sequential ViT with its blocks side by side, and how far that is from the original."""

from dataclasses import dataclass, field
from pathlib import Path

from vtk import console
from vtk.commands import _cli
from vtk.errors import UsageError
from vtk.training.config import PolicyName
from vtk.training.options.distill import DistillKind, DistillOptions

_DESCRIPTION = """Join every P consecutive blocks of a sequential Vision Transformer into one of P parallel branches.

The weights are kept, the function changes (the paper's eq. 1-2): the logits and each block are compared with the
original's. DIR gets model.safetensors, which every command takes, load.py, which loads it with plain timm, and
drift.json. With --finetune the parallel model is then trained on the folder, and accuracies are reported; with
--distill the original is its teacher, which brings it closer to that, with --no-labels from the images alone."""

_EXAMPLES = (
    "vtk parallelize runs/pets/task --branches 2 --data data/pets --out parallel/pets",
    "vtk parallelize pets.safetensors --branches 3 --data data/pets --finetune 5 --out parallel/pets",
    "vtk parallelize runs/pets/task --data data/pets --finetune 5 --distill --out parallel/pets-taught",
    "vtk parallelize vit_base_patch16_224 --out parallel/base",
)


@dataclass(frozen=True)
class ParallelizeConfig:
    """Options of ``vtk parallelize``."""

    source: str = field(metadata={"help": "task pack, run folder, merged .safetensors, or timm model name"})
    out: Path = field(metadata={"help": "folder for model.safetensors, load.py and drift.json"})
    branches: int = field(default=2, metadata={"help": "blocks to join into one; the depth must be a multiple of it"})
    data: Path | None = field(
        default=None, metadata={"help": "folder of images to compare on; default: smoothed random images"}
    )
    images: int = field(default=64, metadata={"help": "how many images to compare on"})
    finetune: int | None = field(
        default=None, metadata={"help": "epochs of fine-tuning on --data afterwards, into DIR/finetune"}
    )
    train: PolicyName = field(default="attn", metadata={"help": "of --finetune: which weights to train"})
    lr: float = field(default=1e-4, metadata={"help": "of --finetune: highest learning rate"})
    batch_size: int = field(default=32, metadata={"help": "of --finetune: images per forward pass"})
    distill: bool = field(
        default=False, metadata={"help": "of --finetune: the sequential model is the teacher of the parallel one"}
    )
    labels: bool = field(
        default=True,
        metadata={
            "help": "of --distill: --no-labels learns from the teacher alone, so that --data may hold any images; into "
            "DIR/distilled"
        },
    )
    distill_kind: DistillKind = field(
        default=DistillOptions.distill_kind,
        metadata={"help": "what of the teacher is matched: soft, hard, features, tokens (see vtk finetune)"},
    )
    distill_alpha: float = field(
        default=DistillOptions.distill_alpha, metadata={"help": "share of the loss that the teacher has"}
    )
    distill_temperature: float = field(
        default=DistillOptions.distill_temperature, metadata={"help": "of --distill-kind soft"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the pack, if they moved"})
    pretrained: bool = field(default=True, metadata={"help": "timm name: take the hub's weights, else random ones"})
    num_classes: int | None = field(default=None, metadata={"help": "timm name: another number of classes"})
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "timm name: pixels, one number or height and width"}
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or cuda:N"})
    seed: int = field(default=0, metadata={"help": "of random images and weights, and of --finetune"})
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that is not empty"})

    def __post_init__(self) -> None:
        if self.branches < 2:
            raise UsageError(f"`--branches` is {self.branches}; allowed is at least 2")
        if self.images < 1:
            raise UsageError(f"`--images` is {self.images}; allowed is at least 1")
        if self.finetune is not None and self.finetune < 1:
            raise UsageError(f"`--finetune` is {self.finetune}; allowed is at least 1 epoch")
        if self.finetune is not None and self.data is None:
            raise UsageError("`--finetune` needs --data, a folder with one folder of images per class")
        self._check_distill()

    def _check_distill(self) -> None:
        if self.distill:
            if self.finetune is None:
                raise UsageError("`--distill` is a way of --finetune; say for how many epochs")
            # the same checks as of a run that names its teacher
            DistillOptions(self.source, self.distill_kind, self.distill_alpha, self.distill_temperature).check()
            if not self.labels and self.distill_alpha != DistillOptions.distill_alpha:
                raise UsageError("`--distill-alpha` weighs teacher against labels, and --no-labels has none; give one")
            return
        if not self.labels:
            raise UsageError("`--no-labels` leaves only the teacher to learn from; add --distill")
        for name in ("distill_kind", "distill_alpha", "distill_temperature"):
            if getattr(self, name) != getattr(DistillOptions, name):
                raise UsageError(f"`--{name.replace('_', '-')}` says how to learn from the teacher; add --distill")


def main(argv: list[str]) -> int:
    """Parse, run, print."""
    config = _cli.parse(
        ParallelizeConfig,
        argv,
        prog="vtk parallelize",
        description=_DESCRIPTION,
        positional=("source",),
        examples=_EXAMPLES,
    )
    from vtk.commands._parallelize import run

    console.emit_json(run(config))
    return 0
