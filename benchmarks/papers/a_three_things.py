"""Touvron et al. 2022: parallel blocks, attention-only fine-tuning, the hMLP stem under masked image modelling."""

from papers.experiment import Experiment, Job

_COMMON = {
    "model": "vit_tiny_patch16_224", "img_size": 32, "batch_size": 16,
    "model_kwargs": ("patch_size=8", "embed_dim=64", "depth=12", "num_heads=2"), "crop_scale": (0.8, 1.0),
}  # fmt: skip


def _parallel(job: Job) -> None:
    for variant, branches in (("12 blocks", 1), ("6 blocks of 2 branches", 2)):
        job.add(variant, **job.train(f"branches{branches}", branches=branches, **job.settings["train"]).numbers)


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
    for variant, stem in (("linear stem", None), ("hMLP stem", "hmlp")):
        name = stem or "linear"
        first = job.pretrain(f"{name}-pretrain", stem=stem, **job.settings["pretrain"])
        job.add(f"{variant}, pre-training", **{k: v for k, v in first.numbers.items() if k != "top1"})
        done = job.finetune(name, stem=stem, weights=first.weights, train="full", **job.settings["finetune"])
        job.add(variant, **done.numbers)


EXPERIMENTS = (
    Experiment("A", "parallel", {"common": _COMMON, "train": {"epochs": 13, "lr": 7e-4}}, _parallel),
    Experiment(
        "A", "policies",
        {"common": _COMMON, "train": {"epochs": 20, "lr": 7e-4}, "finetune": {"epochs": 10, "lr": 5e-4}},
        _policies,
    ),
    Experiment(
        "A", "hmlp",
        {
            "common": _COMMON,
            "pretrain": {"method": "simmim", "epochs": 10, "lr": 7e-4},
            "finetune": {"epochs": 8, "lr": 5e-4, "head_lr_mult": 1.0},
        },
        _hmlp,
    ),
)  # fmt: skip
