"""Experiments and their runs: each run is done once and kept, for a job that was stopped and for other experiments."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]
_WAIT = 0.5  # s between two looks at a run that another experiment is training
Go = Callable[[Path, Settings], tuple[list[dict[str, float]], Path | None]]
"""Trains with options into a folder, and returns the rows of its epochs and the weights."""


@dataclass(frozen=True)
class Experiment:
    """One comparison of one paper.

    Attributes:
        paper: A to E.
        name: of the comparison.
        settings: all that its numbers depend on besides images and seed; JSON values.
        run: does the runs and adds their numbers to the job.
        photographs: settings on photographs; None where it runs on digits only.
    """

    paper: str
    name: str
    settings: Settings
    run: Callable[["Job"], None]
    photographs: Settings | None = None

    @property
    def key(self) -> str:
        """Its paper and name."""
        return f"{self.paper}/{self.name}"

    def on(self, kind: str) -> Settings | None:
        """Return the settings on images of a kind (digits, photographs), None where it does not run on them."""
        return self.settings if kind == "digits" else self.photographs

    def settings_text(self) -> str:
        """Return the settings as a row has them."""
        return json.dumps(dict(self.settings), sort_keys=True)

    def digest(self, images: Settings) -> str:
        """Return what tells results of other settings or images apart."""
        return digest_of([dict(self.settings), dict(images)])


def digest_of(value: Any) -> str:
    """Return ten hex digits of JSON values and paths."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Trained:
    """A run that is done.

    Attributes:
        numbers: ``top1`` and ``val_loss`` (held-out, of the last epoch: to choose the best by the images that judge it
            would flatter), ``loss`` (of training, last epoch), ``images_per_second``, ``diverged``, ``seconds`` (by the
            clock) and ``cpu_seconds`` (of this process: what other work on the machine does not change).
        weights: the checkpoint or pack of the last epoch; None where the run diverged.
    """

    numbers: dict[str, float]
    weights: Path | None


@dataclass
class Job:
    """An experiment with one seed.

    Experiments share runs: the same options on the same images with the same seed are trained once.

    Attributes:
        settings: of the experiment.
        images: folder of `pictures.prepare`.
        described: what the images are, for telling runs apart.
        hflip: probability of mirroring an image; 0 for digits.
        seed: of everything.
        runs: folder of all runs.
        since: seconds since 1970; runs done before are done again.
        name: of the job, under which its runs are kept.
        device: to train on.
        resumed: CPU seconds of runs that this job did before it was stopped, by digest.
        rows: (variant, metric, value), in order.
    """

    settings: Settings
    images: Path
    described: Settings
    hflip: float
    seed: int
    runs: Path
    since: float = 0.0
    name: str = ""
    device: str = "cpu"
    resumed: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, str, float]] = field(default_factory=list)

    def add(self, variant: str, **numbers: float) -> None:
        """Add numbers of a variant."""
        self.rows += [(variant, metric, float(value)) for metric, value in numbers.items()]

    def train(self, name: str, **options: Any) -> Trained:
        """Train from scratch, as `vtk train` does, and return what came of it. The name is only the folder's."""

        def go(out: Path, options: Settings) -> tuple[list[dict[str, float]], Path]:
            from vtk.training.train import train
            from vtk.training.train_config import TrainConfig

            found = train(TrainConfig(out=out, **options))
            return found.run.rows, found.model_last

        return self._once("train", name, options, go)

    def finetune(self, name: str, **options: Any) -> Trained:
        """Fine-tune, as `vtk finetune` does, and return what came of it."""

        def go(out: Path, options: Settings) -> tuple[list[dict[str, float]], Path]:
            from vtk.training.finetune import finetune
            from vtk.training.finetune_config import FinetuneConfig

            found = finetune(FinetuneConfig(out=out, **options))
            return found.rows, found.task_last

        return self._once("finetune", name, options, go)

    def pretrain(self, name: str, **options: Any) -> Trained:
        """Pre-train without labels, as `vtk pretrain` does; of its numbers there is the held-out loss."""

        def go(out: Path, options: Settings) -> tuple[list[dict[str, float]], Path]:
            from vtk.training.pretrain.config import PretrainConfig
            from vtk.training.pretrain.run import pretrain

            found = pretrain(PretrainConfig(out=out, **options))
            return found.rows, found.backbone

        return self._once("pretrain", name, options, go)

    def _once(self, kind: str, name: str, options: Settings, go: Go) -> Trained:
        """Do a run, or return what it left behind if it was done before, by this experiment or another."""
        from vtk.errors import HeldError
        from vtk.locks import hold_name

        options = {
            "data": self.images / "all", "seed": self.seed, "hflip": self.hflip, "workers": 0,
            "device": self.device, **self.settings["common"], **options,
        }  # fmt: skip
        digest = digest_of([kind, options, dict(self.described)])
        out = self.runs / f"seed{self.seed}-{name}-{digest}"
        while True:
            if (kept := self._kept(digest)) is not None:
                return kept
            try:
                with hold_name(self.runs / digest, f"papers {name} seed {self.seed}"):
                    return self._kept(digest) or self._do(out, digest, options, go)
            except HeldError:  # another experiment is training it
                time.sleep(_WAIT)

    def _kept(self, digest: str) -> Trained | None:
        mark = self.runs / f"{digest}.json"
        if not mark.is_file() or mark.stat().st_mtime < self.since:
            return None
        kept = json.loads(mark.read_text(encoding="utf-8"))
        if kept.get("job") == self.name and kept.get("process") != os.getpid():
            self.resumed[digest] = kept["numbers"]["cpu_seconds"]
        return Trained(kept["numbers"], Path(kept["weights"]) if kept["weights"] else None)

    def _do(self, out: Path, digest: str, options: Settings, go: Go) -> Trained:
        from vtk.training.engine.fitting import DivergedError

        if options.get("weights", out) is None:
            raise ValueError(f"{out.name} has nothing to start from: the run before it diverged")
        shutil.rmtree(out, ignore_errors=True)  # of a run that was killed
        begin, cpu = time.perf_counter(), time.process_time()
        try:
            rows, weights = go(out, options)
            last = rows[-1]
            numbers = {"top1": last.get("val_top1", float("nan")), "val_loss": last["val_loss"], "loss": last["loss"]}
            # a median, since something else may run on the machine now and then
            speeds = sorted(row["images_per_second"] for row in rows)
            numbers |= {"images_per_second": speeds[len(speeds) // 2], "diverged": 0.0}
        except DivergedError as error:
            print(f"{out.name} diverged: {error}", flush=True)
            classes = sum(1 for p in (Path(options["data"]) / "train").iterdir() if p.is_dir())
            numbers, weights = {"top1": 1 / classes, "diverged": 1.0}, None
        numbers |= {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
        kept = {"numbers": numbers, "weights": str(weights) if weights else None, "run": out.name}
        text = json.dumps({**kept, "job": self.name, "process": os.getpid()})
        mark = self.runs / f"{digest}.json"
        mark.with_suffix(".tmp").write_text(text, encoding="utf-8")
        mark.with_suffix(".tmp").replace(mark)
        return Trained(numbers, weights)
