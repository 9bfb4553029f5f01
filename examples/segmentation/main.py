"""Semantic segmentation on a ViT whose FFN classifiers use too: ``python examples/segmentation/main.py``.

A base is trained to tell trees, houses and ponds. On it, with the attention alone, go a second classifier and four
segmentation models: a linear and a light UperNet-style head, each with and without Context Broadcasting.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of `shared`

from data import CLASSES, SIZE, pairs, write_classes
from heads import Linear, PairStream, PixelObjective, Segmenter, Uper, mean_iou
from shared import MODEL, check_shared, train_base, train_classifier

import vtk
from vtk.card import Transform
from vtk.files import prepare_output
from vtk.formats import save_tensors
from vtk.models.task_parameters import head_names
from vtk.models.weights.files import read_safetensors
from vtk.training.engine.fitting import fit
from vtk.training.engine.precision import make_precision
from vtk.training.policies import policy

KWARGS = ("patch_size=4", "embed_dim=64", "depth=4", "num_heads=2")
BLOCKS = (1, 2, 3)
HEADS = {"linear": Linear, "uper": Uper}
CB = Transform("add_context_broadcast", {"scale": False, "placement": "end", "on": "mlp", "layers": "upper"})


def train(weights: Path, head: str, cb: bool, out: Path, epochs: int, seed: int) -> float:
    """Train attention and head, write the pack with the head beside it, and return mIoU on other pictures."""
    kwargs = {key: int(value) for key, value in (part.split("=") for part in KWARGS)}
    created = vtk.create_model(
        MODEL, num_classes=len(CLASSES), img_size=SIZE, weights=weights, seed=seed, kwargs=kwargs,
        transforms=(CB,) if cb else (),
    ).created  # fmt: skip
    torch.manual_seed(seed)
    shape = kwargs["embed_dim"], len(CLASSES), len(BLOCKS)
    model = Segmenter(created.model, HEADS[head](*shape), BLOCKS)
    # timm's own classifier, of whole images, stays as it is: the head is another
    trained = policy.select(created.model, "attn") - head_names(created.model)
    policy.apply(created.model, trained)
    mean, std = created.input.mean, created.input.std
    images, masks = pairs(360, seed, mean, std)
    config = vtk.FinetuneConfig(data=out, epochs=epochs, lr=2.5e-3, head_lr_mult=1.0, seed=seed, device="cpu")
    precision = make_precision("fp32", torch.device("cpu"))
    fit(model, PixelObjective(), [PairStream(images, masks, 10, seed)], config, precision)
    held = pairs(100, seed + 1, mean, std)
    score = mean_iou(model, *held, len(CLASSES))
    card = vtk.Card(created.spec, created.input, CLASSES, transforms=created.transforms, metrics={"mIoU": score})
    state = precision.master_state_dict(created.model)
    vtk.save_task(out / "task", state=state, created=created, card=card, trained=trained)
    save_tensors(out / "head.safetensors", model.head.state_dict())
    again = Segmenter(vtk.load_task(out / "task", base=weights).model, HEADS[head](*shape), BLOCKS)
    again.head.load_state_dict(read_safetensors(out / "head.safetensors")[0])
    assert mean_iou(again, *held, len(CLASSES)) == score, "pack and head compute something else than the model"
    return score


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/segmentation"), help="folder for data, base and packs")
    parser.add_argument("--epochs", type=int, default=5, help="of each segmentation model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    out = args.out
    prepare_output(out, overwrite=False)
    write_classes(out / "data", 630, args.seed)
    flags = {"img_size": SIZE, "model_kwargs": KWARGS, "batch_size": 16, "crop_scale": (0.8, 1.0), "seed": args.seed,
             "workers": 0, "device": "cpu"}  # fmt: skip
    weights = train_base(out / "data" / "things", out / "base", epochs=4, **flags)
    packs = {"crops": train_classifier(out / "data" / "crops", out / "crops", weights, epochs=3, lr=1e-3, **flags)}
    scores: dict[str, float] = {}
    for head in HEADS:
        for cb in (False, True):
            name = f"{head}{'+CB' * cb}"
            scores[name] = train(weights, head, cb, out / name, args.epochs, args.seed)
            packs[name] = out / name / "task"
    check_shared(packs)
    print("mIoU on 100 pictures never trained on: " + ", ".join(f"{name} {v:.1%}" for name, v in scores.items()))
    return scores


if __name__ == "__main__":
    main()
