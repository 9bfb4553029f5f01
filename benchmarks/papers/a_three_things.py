"""Touvron et al. 2022: parallel blocks, attention-only fine-tuning, the hMLP stem under masked image modelling."""

from papers.experiment import Experiment, Job
from papers.small_models import PHOTOGRAPHS, TRAIN, VIT


def _parallel(job: Job) -> None:
    for variant, options in (("4 blocks", {}), ("2 blocks of 2 branches", {"branches": 2})):
        name = "parallel" if options else "plain"
        job.add(variant, **job.train(name, **options, **job.settings["train"]).numbers)


def _policies(job: Job) -> None:
    """Half of the classes make the base; each policy fine-tunes it on the other half."""
    base = job.train("base", data=job.images / "first", **job.settings["train"])
    job.add("base", **base.numbers)
    for policy in ("full", "attn", "ffn", "head"):
        done = job.finetune(
            policy, data=job.images / "second", weights=base.weights, train=policy, **job.settings["finetune"]
        )
        job.add(policy, **done.numbers)


def _hmlp(job: Job) -> None:
    for variant, stem in (("linear stem", {}), ("hMLP stem", {"stem": "hmlp"})):
        name = stem.get("stem", "linear")
        first = job.pretrain(f"{name}-pretrain", **stem, **job.settings["pretrain"])
        job.add(f"{variant}, pre-training", **{k: v for k, v in first.numbers.items() if k != "top1"})
        done = job.finetune(name, **stem, weights=first.weights, train="full", **job.settings["finetune"])
        job.add(variant, **done.numbers)


EXPERIMENTS = (
    Experiment("A", "parallel", {"common": VIT, "train": TRAIN}, _parallel),
    Experiment(
        "A", "policies",
        {"common": VIT, "train": TRAIN, "finetune": {"epochs": 20, "lr": 1e-3}}, _policies,
        {"common": VIT, "train": PHOTOGRAPHS, "finetune": {"epochs": 20, "lr": 1e-3}},
    ),
    Experiment(
        "A", "hmlp",
        {
            "common": VIT,
            "pretrain": {"method": "simmim", "epochs": 12, "lr": 1e-3},
            "finetune": {"epochs": 40, "lr": 1e-3, "head_lr_mult": 1.0},
        },
        _hmlp,
    ),
)  # fmt: skip
