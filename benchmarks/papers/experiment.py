"""Experiments and their runs: each run is done once and kept, so that a stopped job continues."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One comparison of one paper.

    Attributes:
        paper: A to E.
        name: of the comparison.
        settings: all that its numbers depend on besides images and seed; JSON values.
        run: does the runs and adds their numbers to the job.
    """

    paper: str
    name: str
    settings: Settings
    run: Callable[["Job"], None]

    @property
    def key(self) -> str:
        """Its paper and name."""
        return f"{self.paper}/{self.name}"

    def digest(self, images: Settings) -> str:
        """Return what tells results of other settings or images apart."""
        text = json.dumps([dict(self.settings), dict(images)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Trained:
    """A run that is done.

    Attributes:
        numbers: ``top1`` and ``val_loss`` (held-out, of the last epoch: to choose the best by the images that judge it
            would flatter), ``loss`` (of training, last epoch), ``seconds``, ``images_per_second`` and ``diverged``.
        weights: the checkpoint or pack of the last epoch; None where the run diverged.
    """

    numbers: dict[str, float]
    weights: Path | None


@dataclass
class Job:
    """An experiment with one seed.

    Attributes:
        settings: of the experiment.
        images: folder of `pictures.prepare`.
        hflip: probability of mirroring an image; 0 for digits.
        seed: of everything.
        folder: of its runs.
        rows: (variant, metric, value), in order.
    """

    settings: Settings
    images: Path
    hflip: float
    seed: int
    folder: Path
    rows: list[tuple[str, str, float]] = field(default_factory=list)

    def add(self, variant: str, **numbers: float) -> None:
        """Add numbers of a variant."""
        self.rows += [(variant, metric, float(value)) for metric, value in numbers.items()]

    def train(self, name: str, **options: Any) -> Trained:
        """Train from scratch, as `vtk train` does, and return what came of it."""

        def go(out: Path, common: Settings) -> tuple[list[dict[str, float]], Path]:
            from vtk.training.train import train
            from vtk.training.train_config import TrainConfig

            found = train(TrainConfig(out=out, **{**common, **options}))
            return found.run.rows, found.model_last

        return self._once(name, go)

    def finetune(self, name: str, **options: Any) -> Trained:
        """Fine-tune, as `vtk finetune` does, and return what came of it."""

        def go(out: Path, common: Settings) -> tuple[list[dict[str, float]], Path]:
            from vtk.training.finetune import finetune
            from vtk.training.finetune_config import FinetuneConfig

            found = finetune(FinetuneConfig(out=out, **{**common, **options}))
            return found.rows, found.task_last

        return self._once(name, go)

    def pretrain(self, name: str, **options: Any) -> Trained:
        """Pre-train without labels, as `vtk pretrain` does; of its numbers there is the held-out loss."""

        def go(out: Path, common: Settings) -> tuple[list[dict[str, float]], Path]:
            from vtk.training.pretrain.config import PretrainConfig
            from vtk.training.pretrain.run import pretrain

            found = pretrain(PretrainConfig(out=out, **{**common, **options}))
            return found.rows, found.backbone

        return self._once(name, go)

    def _once(self, name: str, go: Callable[[Path, Settings], tuple[list[dict[str, float]], Path]]) -> Trained:
        """Do a run, or return what it left behind if it was done before."""
        out, mark = self.folder / name, self.folder / f"{name}.json"
        if mark.is_file():
            kept = json.loads(mark.read_text(encoding="utf-8"))
            return Trained(kept["numbers"], Path(kept["weights"]) if kept["weights"] else None)
        from vtk.training.engine.fitting import DivergedError

        shutil.rmtree(out, ignore_errors=True)
        common = {
            "data": self.images / "all", "seed": self.seed, "hflip": self.hflip, "workers": 0, "device": "cpu",
            **self.settings["common"],
        }  # fmt: skip
        begin = time.perf_counter()
        try:
            rows, weights = go(out, common)
            last = rows[-1]
            numbers = {"top1": last.get("val_top1", float("nan")), "val_loss": last["val_loss"], "loss": last["loss"]}
            # a median, since something else may run on the machine now and then
            speeds = sorted(row["images_per_second"] for row in rows)
            numbers |= {"images_per_second": speeds[len(speeds) // 2], "diverged": 0.0}
        except DivergedError as error:
            print(f"{name} diverged: {error}", flush=True)
            classes = sum(1 for p in (self.images / "all" / "train").iterdir() if p.is_dir())
            numbers, weights = {"top1": 1 / classes, "diverged": 1.0}, None
        done = Trained({**numbers, "seconds": time.perf_counter() - begin}, weights)
        text = json.dumps({"numbers": done.numbers, "weights": str(weights) if weights else None})
        mark.with_suffix(".tmp").write_text(text, encoding="utf-8")
        mark.with_suffix(".tmp").replace(mark)
        return done
