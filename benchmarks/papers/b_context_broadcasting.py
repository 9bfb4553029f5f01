"""Hyeon-Woo et al. 2023: Context Broadcasting makes attention in deeper layers sparser."""

from papers.experiment import Experiment, Job
from papers.small_models import PHOTOGRAPHS, TRAIN, VIT


def _broadcast(job: Job) -> None:
    import torch

    from papers.measures import batches, forward_ratio, load, mean
    from vtk.analysis import attention_entropy

    models = {}
    for variant, cb in (("without", {}), ("with CB", {"cb": True})):
        done = job.train("cb" if cb else "plain", **cb, **job.settings["train"])
        job.add(variant, **done.numbers)
        if done.weights is None:
            continue
        task = load(done.weights)
        held_out = batches(task, job.images, "val", job.settings["images"])
        layers = attention_entropy(task.model, held_out).layers
        half = len(layers) // 2
        job.add(
            variant,
            entropy_deep=mean([layer.mean for layer in layers[half:]]),
            entropy_shallow=mean([layer.mean for layer in layers[:half]]),
            entropy_class_token_deep=mean([layer.cls or 0.0 for layer in layers[half:]]),
            entropy_uniform=layers[0].maximum,
            parameters=sum(p.numel() for p in task.model.parameters()),
        )
        models[variant] = task.model, torch.cat([images for images, _ in held_out])[:64]
    if len(models) == 2:
        (model, images), (base, _) = models["with CB"], models["without"]
        job.add("with CB", forward_ratio=forward_ratio(model, base, images))


EXPERIMENTS = (
    Experiment(
        "B", "broadcast", {"common": VIT, "train": TRAIN, "images": 200}, _broadcast,
        {"common": VIT, "train": PHOTOGRAPHS, "images": 200},
    ),
)  # fmt: skip
