"""Chen et al. 2022: sharpness-aware minimisation finds flatter minima than AdamW alone."""

from papers.experiment import Experiment, Job
from papers.small_models import TRAIN, VIT


def _sam(job: Job) -> None:
    from papers.measures import batches, load
    from vtk.analysis import average_flatness, hessian_max, miss_rate

    speeds = {}
    for variant, options in (("AdamW", {}), ("SAM", {"sam": job.settings["rho"]})):
        done = job.train("sam" if options else "plain", **options, **job.settings["train"])
        job.add(variant, **done.numbers)
        if done.weights is None:
            continue
        speeds[variant] = done.numbers["images_per_second"]
        task = load(done.weights)
        seen = batches(task, job.images, "train", job.settings["images"])
        curvature = hessian_max(task.model, seen)
        flatness = average_flatness(
            task.model, seen, sigma=job.settings["sigma"], draws=job.settings["draws"], seed=job.seed
        )
        job.add(
            variant, lambda_max=curvature.value, lambda_converged=all(curvature.converged.values()),
            train_loss=flatness.loss, noisy_loss=flatness.noisy_loss,
            noise_rise=flatness.noisy_loss - flatness.loss, miss_rate=miss_rate(task.model, seen).rate,
        )  # fmt: skip
    if len(speeds) == 2:
        job.add("SAM", step_ratio=speeds["AdamW"] / speeds["SAM"])


EXPERIMENTS = (
    Experiment(
        "D", "sam",
        {"common": {**VIT, "smoothing": 0.0}, "train": TRAIN, "rho": 0.05, "sigma": 0.02, "draws": 20, "images": 200},
        _sam,
    ),
)  # fmt: skip
