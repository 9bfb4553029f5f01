"""``vtk parallelize``: a sequential ViT with its blocks side by side, and how far that is from the original."""

from dataclasses import dataclass, field
from pathlib import Path

from vtk import console
from vtk.commands import _cli
from vtk.errors import UsageError
from vtk.training.config import PolicyName

_DESCRIPTION = """Join every P consecutive blocks of a sequential Vision Transformer into one of P parallel branches.

The weights are kept, the function changes (the paper's eq. 1-2): the logits and each block are compared with the
original's. DIR gets model.safetensors, which every command takes, load.py, which loads it with plain timm, and
drift.json. With --finetune the parallel model is then trained on the folder, and accuracies are reported."""

_EXAMPLES = (
    "vtk parallelize runs/pets/task --branches 2 --data data/pets --out parallel/pets",
    "vtk parallelize pets.safetensors --branches 3 --data data/pets --finetune 5 --out parallel/pets",
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
