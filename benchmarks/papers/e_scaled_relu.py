"""Wang et al. 2022: the conv stem trains at a learning rate where the patchify stem fails; its tokens differ more."""

from papers.experiment import Experiment, Job


def _stems(job: Job) -> None:
    from papers.measures import batches, load, mean
    from vtk.analysis import token_similarity

    for stem, words in ((None, "patchify stem"), ("conv", "conv stem")):
        for rate in ("low", "high"):
            done = job.train(
                f"{stem or '1proj'}-{rate}", stem=stem, lr=job.settings["lr"][rate], **job.settings["train"]
            )
            variant = f"{words}, {rate} rate"
            job.add(variant, **done.numbers)
            if done.weights is None:
                continue
            task = load(done.weights)
            values = list(
                token_similarity(task.model, batches(task, job.images, "val", job.settings["images"])).values.values()
            )
            half = len(values) // 2  # the stem and the position table are points, too (Wang et al. 2022, figure 1)
            job.add(
                variant, similarity_stem=values[0], similarity_lower=mean(values[:half]),
                similarity_upper=mean(values[half:]),
            )  # fmt: skip


EXPERIMENTS = (
    Experiment(
        "E", "stems",
        {
            "common": {
                "model": "vit_tiny_patch16_224", "img_size": 32, "batch_size": 16, "crop_scale": (0.8, 1.0),
                "model_kwargs": ("patch_size=8", "embed_dim=64", "depth=12", "num_heads=2"), "clip_grad": 0.0,
            },
            "train": {"epochs": 8},
            "lr": {"low": 7e-4, "high": 4e-3},
            "images": 200,
        },
        _stems,
    ),
)  # fmt: skip
