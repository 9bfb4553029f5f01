"""Park and Kim 2022: frequencies and variance of feature maps, pooling, local attention, AlterNet."""

from papers.experiment import Experiment, Job
from papers.small_models import EARLY, FINE_TRAIN, FINE_VIT

POOLED = (*FINE_VIT["model_kwargs"], "global_pool='avg'", "class_token=False")


def _frequencies(job: Job) -> None:
    """Compare the feature map after a unit with that before it, mean over the blocks of one trained ViT."""
    from papers.measures import around_units, batches, load
    from vtk.analysis import feature_spectra, feature_variance

    done = job.train("fine", **job.settings["train"])
    if done.weights is None:
        return
    task = load(done.weights)
    images = batches(task, job.images, "val", job.settings["images"])
    spectra = around_units([(u.kind, u.high) for u in feature_spectra(task.model, images).units])
    variances = around_units([(u.kind, u.variance) for u in feature_variance(task.model, images).units])
    for kind, words in (("msa", "MSA"), ("mlp", "MLP")):
        for place in ("before", "after"):
            job.add(f"{place} {words}", high_frequencies=spectra[kind][place], map_variance=variances[kind][place])
    job.add("after MLP", **done.numbers)


def _pooling(job: Job) -> None:
    _compare_curvature(job, {"class token": {}, "average pooling": {"model_kwargs": POOLED}})


def _local(job: Job) -> None:
    _compare_curvature(job, {"global": {}, "5×5": {"local_attention": 5}, "3×3": {"local_attention": 3}})


def _compare_curvature(job: Job, variants: dict[str, dict[str, object]]) -> None:
    """Accuracy at the end, and the signs of the training loss's largest eigenvalues in the early phase."""
    from papers.measures import load, spectrum

    for variant, options in variants.items():
        done = job.train(variant, **{**job.settings["train"], **options})
        job.add(variant, **done.numbers)
        early = job.train(f"{variant}-early", **{**job.settings["early"], **options})
        if early.weights is None:
            continue
        found = spectrum(load(early.weights), job, job.settings["hessian"])
        job.add(
            variant, early_loss=early.numbers["loss"], negative_eigenvalues=found.negative_share,
            positive_eigenvalues=found.positive_mean, eigenvalues_converged=found.converged,
        )  # fmt: skip


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


_HESSIAN = {"images": 96, "batch_size": 16, "top": 5}
EXPERIMENTS = (
    Experiment("C", "frequencies", {"common": FINE_VIT, "train": FINE_TRAIN, "images": 200}, _frequencies),
    Experiment(
        "C", "pooling", {"common": FINE_VIT, "train": FINE_TRAIN, "early": EARLY, "hessian": _HESSIAN}, _pooling
    ),
    Experiment("C", "local", {"common": FINE_VIT, "train": FINE_TRAIN, "early": EARLY, "hessian": _HESSIAN}, _local),
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
