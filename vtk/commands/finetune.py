"""``vtk finetune``: fine-tune a Vision Transformer on a folder of images, by default its attention weights only."""

from vtk import console
from vtk.commands import _cli
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.recipes import names, read_recipe

_TEXT = "Fine-tune a Vision Transformer on a folder of images, by default its attention only."

_EXAMPLES = (
    "vtk finetune data/pets --attn-only",
    "vtk finetune data/pets --attn-only --model vit_small_patch14_dinov2",
    "vtk finetune data/pets --attn-only --img-size 384 --dry-run",
    "vtk finetune --attn-only --task pets=data/pets --task cars=data/cars@384",
    "torchrun --standalone --nproc_per_node 4 -m vtk finetune data/pets",
)


def main(argv: list[str]) -> int:
    """Run the command."""
    config = _cli.parse(
        FinetuneConfig, argv, prog="vtk finetune", description=f"{_TEXT} Recipes: {', '.join(names('finetune'))}.",
        positional=("data",), examples=_EXAMPLES, preset=("recipe", lambda name: read_recipe(name, FinetuneConfig)),
    )  # fmt: skip
    if config.dry_run:
        from vtk.training.preview import dry_run

        report = dry_run(config)
        report.print()
        console.emit_json(report.to_dict())
    else:
        from vtk.training.finetune import finetune, finetune_tasks

        console.emit_json((finetune_tasks if config.tasks else finetune)(config).to_dict())
    return 0
