"""Hyeon-Woo et al. 2023: Context Broadcasting makes attention in deeper layers sparser."""

from papers.experiment import Experiment, Job
from papers.small_models import CLASS_TOKEN_VIT, PHOTOGRAPHS, TRAIN, VIT


def _broadcast(job: Job) -> None:
    import torch

    from papers.measures import batches, forward_ratio, load, mean
    from vtk.analysis import attention_entropy

    models = {}
    token = {"model_kwargs": job.settings["class token"]}
    for variant, name, options in (
        ("without", "plain", {}),
        ("with CB", "cb", {"cb": True}),
        ("class token, without", "token", token),
        ("class token, with CB", "token-cb", {**token, "cb": True}),
    ):
        done = job.train(name, **options, **job.settings["train"])
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
            entropy_uniform=layers[0].maximum,
            parameters=sum(p.numel() for p in task.model.parameters()),
        )
        if layers[-1].cls is not None:
            job.add(variant, entropy_class_token_deep=mean([layer.cls or 0.0 for layer in layers[half:]]))
        models[variant] = task.model, torch.cat([images for images, _ in held_out])[:64]
    if "with CB" in models and "without" in models:
        (model, images), (base, _) = models["with CB"], models["without"]
        job.add("with CB", forward_ratio=forward_ratio(model, base, images))


_SETTINGS = {"common": VIT, "train": TRAIN, "class token": CLASS_TOKEN_VIT["model_kwargs"], "images": 200}
EXPERIMENTS = (Experiment("B", "broadcast", _SETTINGS, _broadcast, {**_SETTINGS, "train": PHOTOGRAPHS}),)
