"""UPerNet with and without Context Broadcasting: ``python examples/segmentation_upernet/main.py``.

Three small ViTs (plain, with CB, with CB_S) are trained to classify, and fine-tuned as backbones of transformers'
UPerNet head. mIoU is printed on clean pictures, and under noise and blur (Hyeon-Woo et al. 2023, Tables 6 and 9).
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of `shared`
sys.path.append(str(Path(__file__).resolve().parents[1] / "segmentation"))  # of `data` and `heads`

from data import CLASSES, SIZE, pairs, write_classes
from heads import PairStream
from model import PixelObjective, Segmenter
from perturbations import describe, measure
from shared import MODEL

import vtk
from vtk.files import prepare_output
from vtk.training.engine import fit
from vtk.training.engine.precision import make_precision

WIDTH, CHANNELS = 64, 16
KWARGS = ("patch_size=4", f"embed_dim={WIDTH}", "depth=4", "num_heads=2")
BACKBONES = {"ViT": {}, "ViT + CB": {"cb": True}, "ViT + CB_S": {"cb_scale": True}}


def pretrain(data: Path, out: Path, seed: int, **flags: bool) -> Path:
    """Train a whole ViT from random weights to classify, and return its pack, whose card has what was added to it."""
    config = vtk.FinetuneConfig(
        data=data, out=out, model=MODEL, model_kwargs=KWARGS, img_size=SIZE, train="full", pretrained=False, epochs=4,
        lr=1e-3, head_lr_mult=1.0, batch_size=16, crop_scale=(0.8, 1.0), seed=seed, workers=0, device="cpu", **flags,
    )  # fmt: skip
    return vtk.finetune(config).task


def segment(pack: Path, epochs: int, seed: int) -> dict[str, list[float]]:
    """Fine-tune UPerNet on the pack's backbone, and return mIoU on other pictures for each perturbation and draw."""
    loaded = vtk.load_task(pack)
    mean, std = loaded.card.input.mean, loaded.card.input.std
    torch.manual_seed(seed)
    model = Segmenter(loaded.model.train(), width=WIDTH, classes=len(CLASSES), channels=CHANNELS)
    model.requires_grad_(True)
    config = vtk.FinetuneConfig(
        data=pack, epochs=epochs, lr=2e-3, head_lr_mult=1.0, weight_decay=0.01, schedule="linear", warmup=0.1,
        seed=seed, device="cpu",
    )  # fmt: skip
    stream = PairStream(*pairs(240, seed, mean, std), 8, seed)
    fit(model, PixelObjective(), [stream], config, make_precision("fp32", torch.device("cpu")), show_progress=False)
    pixels, masks = pairs(80, seed + 1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return measure(model, pixels, masks, len(CLASSES), mean, std)


def main(argv: list[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Run the example, and return mIoU of each model, perturbation and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/upernet"), help="folder for data and backbones")
    parser.add_argument("--epochs", type=int, default=4, help="of each segmentation model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    out = args.out
    prepare_output(out, overwrite=False)
    write_classes(out / "data", 450, args.seed)
    scores = {}
    for name, flags in BACKBONES.items():
        pack = pretrain(out / "data" / "things", out / name.replace(" ", ""), args.seed, **flags)
        scores[name] = segment(pack, args.epochs, args.seed)
    print("\nmIoU on 80 pictures never trained on; a mean of 5 draws of noise has its 95 % interval")
    for name, found in scores.items():
        for perturbation, values in found.items():
            print(f"{name:10}  {perturbation:26}  {describe(values)}")
    print("no verdict: one seed on drawn pictures does not tell these models apart")
    return scores


if __name__ == "__main__":
    main()
