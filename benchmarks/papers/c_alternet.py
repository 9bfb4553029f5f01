"""Park and Kim 2022: an AlterNet against the pre-activation ResNet that it is built from, at equal steps."""

from papers.experiment import Experiment, Job


def _alternet(job: Job) -> None:
    from papers.measures import load

    for variant, name, extra in (
        ("pre-activation ResNet-18", "preact_resnet_18_cifar", ()),
        ("AlterNet-18", "alternet_18_cifar", job.settings["attention"]),
    ):
        kwargs = (*job.settings["kwargs"], *extra)
        done = job.train(name, model=name, model_kwargs=kwargs, **job.settings["train"])
        job.add(variant, **done.numbers)
        if done.weights is not None:
            job.add(variant, parameters=sum(p.numel() for p in load(done.weights).model.parameters()))


EXPERIMENTS = (
    Experiment(
        "C", "alternet",
        {
            "common": {"img_size": 32, "batch_size": 16, "crop_scale": (0.8, 1.0)},
            "kwargs": ("channels=[16,32,64,128]",),
            # heads as in the paper; a head's channels shrink with the model's
            "attention": ("heads=[3,6,12,24]", "head_dim=4"),
            "train": {"epochs": 5, "lr": 7e-4},
        },
        _alternet,
    ),
)  # fmt: skip
