"""Object re-identification on a ViT whose FFN other tasks use too: ``python examples/reid/main.py``.

A base is trained as a plain classifier, a second classifier gets its own attention on it, and so does a model that
tells people apart who were never trained on: triplet loss over batches of P identities, judged by mAP and Rank-1.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of `shared`

from data import HEIGHT, WIDTH, write
from metric import PkSampler, ReId, ReIdObjective, rank
from shared import MODEL, check_shared, train_base, train_classifier

import vtk
from vtk.data import Sample, eval_transform, make_loader, train_transform
from vtk.files import prepare_output
from vtk.training.engine import fit
from vtk.training.engine.precision import make_precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.streams import ImageStream
from vtk.training.policies import policy

KWARGS = ("patch_size=8", "embed_dim=96", "depth=4", "num_heads=3")
EMBEDDING = 64  # numbers that describe a picture
PEOPLE, EACH = 8, 4  # of a batch
CPU = torch.device("cpu")


def samples(root: Path) -> tuple[list[Sample], list[int]]:
    """Return the pictures of a part with their identities, and their cameras."""
    paths = sorted(root.rglob("*.png"))
    names = sorted({path.parent.name for path in paths})
    return [Sample(path, names.index(path.parent.name)) for path in paths], [int(path.name[1]) for path in paths]


@torch.no_grad()
def judge(model: nn.Module, spec: object, root: Path) -> tuple[float, float]:
    """Return mAP and Rank-1 of a model's outputs on people it was not trained on."""
    found, cameras = samples(root)
    loader = make_loader(found, eval_transform(spec), batch_size=64, shuffle=False, seed=0, workers=0)
    embedded = torch.cat([model.eval()(images) for images, _ in loader])
    return rank(embedded, [sample.label for sample in found], cameras)


def train(data: Path, weights: Path, out: Path, epochs: int, seed: int) -> dict[str, float]:
    """Train the metric head and the attention, write the pack, and return the numbers before and after."""
    kwargs = dict(part.split("=") for part in KWARGS)
    created = vtk.create_model(
        MODEL, num_classes=EMBEDDING, img_size=(HEIGHT, WIDTH), weights=weights, seed=seed,
        kwargs={key: int(value) for key, value in kwargs.items()},
    ).created  # fmt: skip
    before = judge(created.model, created.input, data / "test")
    found, _ = samples(data / "train")
    torch.manual_seed(seed)
    model = ReId(created.model, EMBEDDING, len({sample.label for sample in found}))
    trained = policy.select(created.model, "attn")
    policy.apply(created.model, trained)
    sampler = PkSampler([sample.label for sample in found], PEOPLE, EACH, seed)
    stream = ImageStream(
        found, train_transform(created.input, crop_scale=(0.8, 1.0), reprob=0.3), batch_size=PEOPLE * EACH, seed=seed,
        workers=0, ranks=Ranks(CPU), sampler=sampler,
    )  # fmt: skip
    config = vtk.FinetuneConfig(data=data / "train", epochs=epochs, lr=1e-3, head_lr_mult=1.0, seed=seed, device="cpu")
    precision = make_precision("fp32", CPU)
    result = fit(model, ReIdObjective(), [stream], config, precision)
    after = judge(created.model, created.input, data / "test")
    numbers = {"mAP": after[0], "rank1": after[1]}
    # the outputs are an embedding: what `vtk export onnx` makes of this pack gives it, too
    card = vtk.Card(created.spec, created.input, tuple(f"e{i}" for i in range(EMBEDDING)), metrics=numbers)
    vtk.save_task(out, state=precision.master_state_dict(created.model), created=created, card=card, trained=trained)
    again = judge(vtk.load_task(out, base=weights).model, created.input, data / "test")
    assert again == after, "the pack computes something else than the model"
    return {"mAP_before": before[0], "rank1_before": before[1], **numbers, "loss": result.rows[-1]["loss"]}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/reid"), help="folder for data, base and packs")
    parser.add_argument("--epochs", type=int, default=12, help="of the metric training")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    out, data = args.out, args.out / "data"
    prepare_output(out, overwrite=False)
    write(data, train=24, test=16, shots=4, seed=args.seed)
    size = {"img_size": (HEIGHT, WIDTH), "model_kwargs": KWARGS, "seed": args.seed, "workers": 0, "device": "cpu"}
    weights = train_base(data / "shirts", out / "base", epochs=10, **size)
    # legs are at the bottom of a picture: a small crop would cut them off
    legs = {"epochs": 8, "lr": 1e-3, "batch_size": 8, "crop_scale": (0.85, 1.0)}
    classifier = train_classifier(data / "trousers", out / "trousers", weights, **legs, **size)
    numbers = train(data, weights, out / "task", args.epochs, args.seed)
    check_shared({"trousers": classifier, "re-identification": out / "task"})
    print(f"people never trained on: mAP {numbers['mAP_before']:.1%} → {numbers['mAP']:.1%}, "
          f"Rank-1 {numbers['rank1_before']:.1%} → {numbers['rank1']:.1%}; pack {out / 'task'}")  # fmt: skip
    return numbers


if __name__ == "__main__":
    main()
