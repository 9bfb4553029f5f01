"""Train a whole model on a folder of images, from random weights or from a checkpoint."""

from vtk import console
from vtk.commands import _cli
from vtk.training.recipes import names, read_recipe
from vtk.training.train_config import TrainConfig

_EXAMPLES = (
    "vtk train data/pets --model vit_tiny_patch16_224 --epochs 300 --ema 0.9999",
    "vtk train data/pets --recipe deit --model vit_small_patch16_224 --batch-size 256",
    "vtk train data/pets --recipe deit --epochs 100 --mixup 0 --out runs/pets-100",
    "vtk train data/pets --weights runs/pets/model.safetensors --lr 1e-4 --epochs 20 --out runs/pets-on",
    "torchrun --standalone --nproc_per_node 4 -m vtk train data/pets --recipe deit --batch-size 1024",
)


def main(argv: list[str]) -> int:
    """Run the command."""
    config = _cli.parse(
        TrainConfig, argv, prog="vtk train", description=f"{__doc__ or ''} Recipes: {', '.join(names('train'))}.",
        positional=("data",), examples=_EXAMPLES, preset=("recipe", lambda name: read_recipe(name, TrainConfig)),
    )  # fmt: skip
    if config.dry_run:
        from vtk.training.preview import dry_run

        report = dry_run(config)
        report.print()
        console.emit_json(report.to_dict())
    else:
        from vtk.training.train import train

        console.emit_json(train(config).to_dict())
    return 0
