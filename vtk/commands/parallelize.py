"""``vtk parallelize``: a sequential ViT with its blocks side by side, and how far that is from the original."""

from vtk import console
from vtk.branches.config import ParallelizeCommand
from vtk.commands import _cli

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
