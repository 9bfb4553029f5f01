"""Park and Kim 2022: frequencies and variance of feature maps, pooling, local attention, AlterNet."""

from papers.experiment import Experiment, Job
from papers.small_models import CLASS_TOKEN_VIT, FINE_TRAIN, FINE_VIT, TRAIN, VIT


def _frequencies(job: Job) -> None:
    """Compare the feature map after a unit with that before it, mean over the blocks of one trained ViT."""
    from papers.measures import around_units, batches, load
    from vtk.analysis import feature_spectra, feature_variance

    done = job.train("fine", **job.settings["train"])
    job.add("model", **done.numbers)
    if done.weights is None:
        return
    task = load(done.weights)
    images = batches(task, job.images, "val", job.settings["images"])
    spectra = around_units([(u.kind, u.high) for u in feature_spectra(task.model, images).units])
    variances = around_units([(u.kind, u.variance) for u in feature_variance(task.model, images).units])
    for kind, words in (("msa", "MSA"), ("mlp", "MLP")):
        for place in ("before", "after"):
            job.add(f"{place} {words}", high_frequencies=spectra[kind][place], map_variance=variances[kind][place])


def _pooling(job: Job) -> None:
    """Accuracy at the end, and the signs of the largest eigenvalues of runs that end in the early phase."""
    from papers.measures import load, mean, spectrum

    for variant, name, options in (
        ("class token", "token", {"model_kwargs": job.settings["class token"]}),
        ("average pooling", "plain", {}),
    ):
        job.add(variant, **job.train(name, **{**job.settings["train"], **options}).numbers)
        found = []
        for epochs in job.settings["early"]:
            early = job.train(f"{name}-{epochs}", **{**job.settings["train"], **options, "epochs": epochs})
            if early.weights is not None:
                found.append(spectrum(load(early.weights), job, job.settings["hessian"]))
        job.add(
            variant, negative_eigenvalues=mean([f.negative_share for f in found]),
            positive_eigenvalues=mean([f.positive_mean for f in found]),
            eigenvalues_converged=mean([f.converged for f in found]),
        )  # fmt: skip


def _local(job: Job) -> None:
    for variant, name, options in (("global", "fine", {}), ("5×5", "local", {"local_attention": 5})):
        job.add(variant, **job.train(name, **options, **job.settings["train"]).numbers)


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


_ALTERNET = {
    "common": {"img_size": 32, "batch_size": 32, "crop_scale": (0.8, 1.0), "weight_decay": 0.3},
    "kwargs": ("channels=[16,32,64,128]",),
    # heads as in the paper; a head's channels shrink with the model's
    "attention": ("heads=[3,6,12,24]", "head_dim=4"),
    "train": {"epochs": 6, "lr": 1e-3},
}  # fmt: skip
EXPERIMENTS = (
    Experiment("C", "frequencies", {"common": FINE_VIT, "train": FINE_TRAIN, "images": 200}, _frequencies),
    Experiment(
        "C", "pooling",
        {
            "common": VIT, "train": TRAIN, "class token": CLASS_TOKEN_VIT["model_kwargs"],
            # where negative eigenvalues are common; a mean of two, since one run may still be on its first plateau
            "early": (4, 8), "hessian": {"images": 96, "batch_size": 16, "top": 5, "smoothing": 0.1},
        },
        _pooling,
    ),
    Experiment("C", "local", {"common": FINE_VIT, "train": FINE_TRAIN}, _local),
    Experiment("C", "alternet", _ALTERNET, _alternet, {**_ALTERNET, "train": {"epochs": 10, "lr": 1e-3}}),
)  # fmt: skip
