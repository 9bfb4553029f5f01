"""Options of ``vtk analyze``; free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.analysis.diagnostic_names import CORRUPTIONS, GROUPS, NAMES
from vtk.errors import UsageError
from vtk.options import Config, Option, require
from vtk.options.shared import (
    Base,
    Device,
    EvalBatch,
    ImgSize,
    MaybeFolder,
    NumClasses,
    Overwrite,
    Pretrained,
    Seed,
    Split,
    Threads,
    Workers,
)


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(Config):
    """What to look at, on which images, and where the report goes.

    Raises:
        UsageError: a value is out of range, unknown or contradicts another.
    """

    GROUP: ClassVar[str] = "diagnostics"

    data: MaybeFolder = None
    what: Annotated[
        tuple[str, ...],
        Option(f"diagnostics by name, or a group: all, {', '.join(GROUPS)}", often=True, nonempty=True,
               among=("all", *GROUPS, *NAMES)),
    ] = ("all",)  # fmt: skip
    split: Split = "val"
    max_images: Annotated[
        int, Option("most images, drawn by --seed, the same for all models", "data", often=True, least=1)
    ] = 512
    batch_size: EvalBatch = 32
    hessian_images: Annotated[int, Option("hessian, hessian-blocks, ntk: most images", least=1)] = 64
    hessian_batch: Annotated[
        int, Option("hessian: images of a mini-batch, each with a spectrum (Park and Kim 2022: 16)", least=1)
    ] = 16
    top: Annotated[int, Option("hessian: eigenvalues of each mini-batch (Park and Kim 2022: 5)", least=1)] = 5
    grid: Annotated[
        int, Option("landscape: points along each axis, an odd number", least=3, allowed="an odd number, 3 or more")
    ] = 11
    span: Annotated[float, Option("landscape: from −span to span, in norms of the filters", above=0)] = 1.0
    directions: Annotated[
        Literal["filter", "reference"],
        Option("landscape: scale each output filter (Li et al. 2018), or each input (Park and Kim 2022)"),
    ] = "filter"
    perturb_vectors: Annotated[bool, Option("landscape: move 1-D tensors too (biases, norms), scaled as a whole")] = (
        False
    )
    sigma: Annotated[float, Option("flatness: standard deviation of the noise on the weights", above=0)] = 0.01
    draws: Annotated[
        int, Option("flatness: draws of noise, an even number", least=2, allowed="an even number, 2 or more")
    ] = 20
    loss_images: Annotated[
        Literal["plain", "augmented"], Option("hessian, landscape: images as evaluated, or augmented as in training")
    ] = "plain"
    weight_decay: Annotated[float, Option("hessian, flatness, landscape: factor of the l2 term", least=0)] = 0.0
    corruptions: Annotated[
        tuple[str, ...], Option("corruptions: only these kinds (default: all)", among=CORRUPTIONS, unique=True)
    ] = ()
    severities: Annotated[
        tuple[int, ...], Option("corruptions: strengths from 1 to 5", nonempty=True, least=1, most=5)
    ] = (1, 3, 5)
    epsilons: Annotated[
        tuple[float, ...],
        Option("attacks: radii of the L∞ ball, in 255ths of the pixel range", nonempty=True, above=0, most=255),
    ] = (0.5, 1.0, 2.0, 4.0)
    overlay_images: Annotated[int, Option("overlays, rollout: images that are drawn", least=1)] = 8
    device: Device = "auto"
    threads: Threads = None
    workers: Workers = None
    seed: Seed = 0
    out: Annotated[Path, Option("folder of report.html, analysis.json and figures/", "output", often=True)] = Path(
        "analysis"
    )
    resume: Annotated[
        bool, Option("continue in --out: what is there of the same model, images and options is kept", "output",
                     often=True)
    ] = False  # fmt: skip
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        require(self.grid % 2 == 1, "grid", self.grid, "an odd number, 3 or more: the model is in the middle")
        require(self.draws % 2 == 0, "draws", self.draws, "an even number, 2 or more: noise comes in pairs")
        if self.resume and self.overwrite:
            raise UsageError("`--resume` goes on and `--overwrite` starts anew; give one of them")

    def chosen(self) -> tuple[str, ...]:
        """Return the diagnostics that ``what`` names, each once, in the report's order."""
        known = {"all": NAMES, **GROUPS, **{name: (name,) for name in NAMES}}
        wanted = {one for name in self.what for one in known[name]}
        return tuple(name for name in NAMES if name in wanted)

    @property
    def named(self) -> frozenset[str]:
        """The diagnostics that were asked for one by one, not by a group's name."""
        return frozenset(self.what) & frozenset(NAMES)


@dataclass(frozen=True, kw_only=True)
class AnalyzeCommand(AnalyzeConfig):
    """``vtk analyze``: one model, or two side by side, and what to look at."""

    model: Annotated[
        str, Option("task pack, run folder, merged checkpoint or timm model name", "source", often=True)
    ] = ""
    compare: Annotated[
        tuple[str, str] | None,
        Option(
            "two models side by side, or two folders that this command wrote",
            "source",
            often=True,
            allowed="two models, or two folders that this command wrote",
        ),
    ] = None
    img_size: ImgSize = None
    pretrained: Pretrained = True
    num_classes: NumClasses = None
    base: Base = None

    def opening(self) -> dict[str, Any]:
        """Return what `vtk.open_source` is told beside the source."""
        return {
            "base": self.base, "pretrained": self.pretrained, "num_classes": self.num_classes,
            "img_size": self.img_size, "seed": self.seed,
        }  # fmt: skip

    def check(self) -> None:
        """Refuse options that contradict each other."""
        super().check()
        if self.compare and self.model:
            raise UsageError(f"`--compare` names both models; leave out {self.model}")
        if not self.compare and not self.model:
            raise UsageError("no model; give a pack, a checkpoint or a timm model name, or --compare A B")
