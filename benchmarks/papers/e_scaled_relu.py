"""Wang et al. 2022: the conv stem trains at a learning rate where the patchify stem fails; its tokens differ more."""

from papers.experiment import Experiment, Job
from papers.small_models import VIT


def _stems(job: Job) -> None:
    from papers.measures import batches, load, mean
    from vtk.analysis import token_similarity

    for stem, words in (({}, "patchify stem"), ({"stem": "conv"}, "conv stem")):
        for rate in ("low", "high"):
            name = f"{stem.get('stem', '1proj')}-{rate}"
            done = job.train(name, **stem, lr=job.settings["lr"][rate], **job.settings["train"])
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


_SETTINGS = {
    # as in the paper without clipping, which would hold the high rate back
    "common": {**VIT, "clip_grad": 0.0}, "train": {"epochs": 15}, "lr": {"low": 1e-3, "high": 5e-3}, "images": 200,
}  # fmt: skip
EXPERIMENTS = (Experiment("E", "stems", _SETTINGS, _stems, {**_SETTINGS, "train": {"epochs": 12}}),)  # fmt: skip
