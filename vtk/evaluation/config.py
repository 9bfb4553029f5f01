"""Options of ``vtk eval`` and ``vtk predict``; free of torch."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError

PrecisionName = Literal["fp32", "bf16", "fp16"]
_BACKEND = "eager, compile, fused, fused+graph, ort-cpu or ort-cuda; default: ort-cpu for an .onnx, else eager"


@dataclass(frozen=True)
class EvalConfig:
    """Options of ``vtk eval``; what is left out comes from the card, so that a pack gives its training run's metric."""

    source: str = field(metadata={"help": "task pack, run folder, merged .safetensors, or .onnx of `vtk export onnx`"})
    data: Path = field(metadata={"help": "folder with train/ and val/, or with one folder per class"})
    split: Literal["val", "train", "all"] = field(
        default="val", metadata={"help": "which images; a folder without splits is divided as the training run did"}
    )
    backend: str | None = field(default=None, metadata={"help": _BACKEND})
    precision: PrecisionName | None = field(default=None, metadata={"help": "default: the training run's"})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda or auto; default: the training run's"})
    batch_size: int | None = field(default=None, metadata={"help": "default: the training run's evaluation batch"})
    reference: str | None = field(
        default=None, metadata={"help": "a pack or checkpoint; says how often the most likely class is the same"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the pack, if they moved"})
    workers: int | None = field(default=None, metadata={"help": "processes that decode images; default: one per core"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of one operation"})
    out: Path | None = field(default=None, metadata={"help": "folder for metrics.json, per_class.csv, confusion.png"})
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that is not empty"})

    def __post_init__(self) -> None:
        _at_least(1, batch_size=self.batch_size)
        check_threads(self.threads)
        _at_least(0, workers=self.workers)


@dataclass(frozen=True)
class PredictConfig:
    """Options of ``vtk predict``."""

    source: str = field(metadata={"help": "task pack, run folder, merged .safetensors, or .onnx of `vtk export onnx`"})
    images: Path = field(metadata={"help": "an image, or a folder of images at any depth"})
    top_k: int = field(default=3, metadata={"help": "labels per image, most likely first"})
    threshold: float | None = field(
        default=None, metadata={"help": "of several labels: give those whose probability is at least this; default 0.5"}
    )
    out: Path = field(
        default=Path("predictions.csv"),
        metadata={"help": "CSV file: path,label1,score1,label2,… or, of several labels, path,label1;label2,scores"},
    )
    backend: str | None = field(default=None, metadata={"help": _BACKEND})
    precision: PrecisionName | None = field(default=None, metadata={"help": "default: the training run's"})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda or auto; default: the training run's"})
    batch_size: int | None = field(default=None, metadata={"help": "default: the training run's evaluation batch"})
    base: Path | None = field(default=None, metadata={"help": "base weights of the pack, if they moved"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of one operation"})
    overwrite: bool = field(default=False, metadata={"help": "replace `--out` even if it is no table of predictions"})

    def __post_init__(self) -> None:
        _at_least(1, top_k=self.top_k, batch_size=self.batch_size)
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UsageError(f"`--threshold` is {self.threshold}; give a probability from 0 to 1")
        check_threads(self.threads)


def check_threads(threads: int | None) -> None:
    """Refuse numbers that no machine wants; thousands would end the process inside the OpenMP run time.

    Raises:
        UsageError: ``threads`` is below 1 or far above the number of CPUs.
    """
    most = max(64, 4 * (os.cpu_count() or 1))
    if threads is not None and not 1 <= threads <= most:
        raise UsageError(f"`--threads` is {threads}; give 1 to {most}")


def _at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise UsageError(f"`--{name.replace('_', '-')}` is {value}; give at least {least}")
