"""``vtk parallelize``: converts a sequential ViT to parallel blocks and reports the drift."""

from vtk import console
from vtk.branches.config import ParallelizeCommand
from vtk.commands import _cli

_DESCRIPTION = """Convert every P consecutive blocks of a sequential Vision Transformer to one block of P branches.

The weights stay the same, but the function changes (Touvron et al. 2022, eq. 1-2): the logits and each block are
compared with the original's. DIR gets model.safetensors, which every command takes, load.py, which loads it with plain
timm, and drift.json. With --finetune the parallel model is then trained on the folder, and accuracies are reported;
with --distill the original is the teacher; with --no-labels no labels are used."""

_EXAMPLES = (
    "vtk parallelize runs/pets/task --branches 2 --data data/pets --out parallel/pets",
    "vtk parallelize pets.safetensors --branches 3 --data data/pets --finetune 5 --out parallel/pets",
    "vtk parallelize runs/pets/task --data data/pets --finetune 5 --distill --out parallel/pets-taught",
    "vtk parallelize vit_base_patch16_224 --out parallel/base",
)


def main(argv: list[str]) -> int:
    """Parse, run, print."""
    config = _cli.parse(
        ParallelizeCommand,
        argv,
        prog="vtk parallelize",
        description=_DESCRIPTION,
        positional=("source",),
        examples=_EXAMPLES,
    )
    from vtk.branches.join import parallelize

    console.emit_json(parallelize(config.source, config, **config.opening()).to_dict())
    return 0
