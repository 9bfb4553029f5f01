"""Pre-train a Vision Transformer: without labels (masked image modelling, DINO), or with them (`--method supcon`)."""

from vtk import console
from vtk.commands import _cli
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.recipes import names, read_recipe

_EXAMPLES = (
    "vtk pretrain photos --method beit --img-size 224",
    "vtk pretrain photos --method mae --model vit_base_patch16_224 --batch-size 256 --epochs 400",
    "vtk pretrain photos --method simmim --mask-unit 2 --drop-path 0.1",
    "vtk pretrain photos --method beit --tokenizer runs/photos-beit/tokenizer.safetensors --out runs/again",
    "vtk pretrain photos --method dino --img-size 224 --epochs 200",
    "torchrun --standalone --nproc_per_node 4 -m vtk pretrain photos --method mae --batch-size 1024",
)


def main(argv: list[str]) -> int:
    """Run the command."""
    config = _cli.parse(
        PretrainConfig, argv, prog="vtk pretrain",
        description=f"{__doc__ or ''} Recipes: {', '.join(names('pretrain'))}.", positional=("data",),
        examples=_EXAMPLES, preset=("recipe", lambda name: read_recipe(name, PretrainConfig)),
    )  # fmt: skip
    from vtk.training.pretrain.run import pretrain

    console.emit_json(pretrain(config).to_dict())
    return 0
