"""Options of ``vtk profile``."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.evaluation.config import FP8_BACKENDS, check_fp8
from vtk.options import Config, Option
from vtk.options.shared import (
    BudgetMs,
    Cpus,
    Device,
    Fp8Images,
    ImgSize,
    MaybeOut,
    Overwrite,
    Reference,
    Seed,
    SourceOptions,
    Stability,
    Threads,
)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Config):
    """Measurement options and output of a profile.

    Raises:
        UsageError: a value is out of range, named twice or contradicts another.
    """

    GROUP: ClassVar[str] = "measure"

    batch_sizes: Annotated[
        tuple[int, ...], Option("batch sizes to measure, in ascending order", often=True, least=1, unique=True,
                                nonempty=True)
    ] = (1, 2, 4, 8, 16, 32)  # fmt: skip
    backends: Annotated[
        tuple[str, ...],
        Option("back-ends, e.g. eager,fused,ort-cpu (default: all available)", often=True, unique=True),
    ] = ()
    device: Device = "auto"
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "fp8"],
        Option("precision of weights and inputs; auto: that of an exported file, else fp32", often=True),
    ] = "auto"
    data: Fp8Images = None
    threads: Threads = None
    cpus: Cpus = None
    duration: Annotated[
        float, Option("maximum seconds per back-end and batch size; stable ones end earlier", often=True, above=0)
    ] = 10.0
    stability: Stability = 3.0
    order: Annotated[
        Literal["interleaved", "sequential"],
        Option("interleave the back-ends at each batch size, or run one after the other"),
    ] = "interleaved"
    h2d: Annotated[Literal["in", "out"], Option("include host-device copies in the times (in) or not (out)")] = "out"
    budget_ms: BudgetMs = None
    on: Annotated[
        Literal["cpu"] | None,
        Option("cpu: search back-ends, precisions, batches, threads and instances for the best within --budget-ms",
               often=True),
    ] = None  # fmt: skip
    exhaustive: Annotated[bool, Option("--on cpu: measure every setup for the whole --duration")] = False
    ceilings: Annotated[
        bool, Option("first measure the device's memory bandwidth and matmul rate, for the roofline")
    ] = False
    tasks: Annotated[tuple[str, ...], Option("bank, bank+graph: further packs loaded beside the source")] = ()
    img_sizes: Annotated[
        tuple[int, ...],
        Option("timm name: image sizes to measure, with a report for each", least=1, unique=True),
    ] = ()
    reference: Reference = None
    seed: Seed = 0
    out: MaybeOut = None
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.tasks and not {"bank", "bank+graph"} & set(self.backends):
            raise UsageError(f"`--tasks` {_show(self.tasks)} is for the back-end `bank`; add it to --backends")
        if self.on is None:
            check_fp8(self.precision, self.data)
        self._check_search()
        if self.precision == "fp8" and (others := [name for name in self.backends if name not in FP8_BACKENDS]):
            raise UsageError(f"`--backends` {_show(tuple(others))} has no fp8; give {' and '.join(FP8_BACKENDS)}")

    def _check_search(self) -> None:
        """Refuse options that a search does not have, or that only a search has."""
        if self.on is None:
            if self.exhaustive:
                raise UsageError("`--exhaustive` is of the search; add --on cpu --budget-ms MS")
            return
        if self.budget_ms is None:
            raise UsageError("`--on cpu` searches the highest throughput within a latency; give --budget-ms MS")
        if self.device not in ("auto", "cpu"):
            raise UsageError(f"`--device` {self.device} contradicts --on cpu; leave one of them out")
        if self.precision in ("fp16", "fp8"):
            raise UsageError(
                f"`--precision` {self.precision} is none of a CPU's (--on cpu); give fp32 or bf16, or leave it out"
            )
        idle = {"--order": self.order != "interleaved", "--h2d": self.h2d != "out", "--ceilings": self.ceilings,
                "--tasks": self.tasks, "--img-sizes": self.img_sizes}  # fmt: skip
        if given := [flag for flag, value in idle.items() if value]:
            raise UsageError(f"`--on cpu` does nothing with {' and '.join(given)}; leave it out")


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(ProfileConfig, SourceOptions):
    """``vtk profile``: a source and its measurement options, or two reports to compare."""

    source: Annotated[
        str,
        Option("task pack, checkpoint, .onnx, .xml, .pt2, TensorRT engine or timm model name", "source", often=True),
    ] = ""
    img_size: ImgSize = None
    compare: Annotated[
        tuple[str, ...],
        Option("compare two profile.json files; nothing is measured", often=True,
               metavar="OLD NEW"),
    ] = ()  # fmt: skip
    fail_above: Annotated[
        float | None, Option("--compare: exit code 4 if a latency increased by more than this percentage", above=0)
    ] = None

    def check(self) -> None:
        """Refuse options that have no effect on a comparison or on ceilings alone."""
        super().check()
        if self.img_size is not None and self.img_sizes:
            raise UsageError("`--img-size` and `--img-sizes` exclude each other; give one of them")
        if self.fail_above is not None and not self.compare:
            raise UsageError(f"`--fail-above` {self.fail_above}: give a percentage above 0, together with --compare")
        if self.compare and (len(self.compare) != 2 or self.source):
            raise UsageError(f"`--compare` {_show(self.compare)}: give two profile.json, old and new, and no source")
        alone = self.ceilings and self.source == "" and not self.compare
        if not self.source.strip() and not self.compare and not alone:
            raise UsageError("`source` is empty; give a task pack, a checkpoint, an .onnx file or a timm model name")
        if not self.compare and not alone:
            return
        mode = "--compare" if self.compare else "--ceilings without a source"
        given = {
            "--out": self.out, "--img-sizes": self.img_sizes, "--img-size": self.img_size, "--tasks": self.tasks,
            "--budget-ms": self.budget_ms, "--on": self.on, "--backends": self.backends, "--reference": self.reference,
            "--ceilings": self.compare and self.ceilings,
        }  # fmt: skip
        if idle := [flag for flag, value in given.items() if value]:
            raise UsageError(f"`{mode}` measures no model, so {' and '.join(idle)} would do nothing; leave it out")


def _show(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values)) or "(nothing)"
