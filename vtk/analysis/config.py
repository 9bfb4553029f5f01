"""Options of ``vtk analyze``; imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.analysis.diagnostic_names import CORRUPTIONS, GROUPS, NAMES
from vtk.analysis.protocols import PROTOCOLS
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
    Threads,
    Workers,
)


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig(Config):
    """Options of an analysis: diagnostics, images, output.

    Raises:
        UsageError: a value is out of range, unknown or contradicts another.
    """

    GROUP: ClassVar[str] = "diagnostics"

    data: MaybeFolder = None
    what: Annotated[
        tuple[str, ...],
        Option(f"diagnostics or groups of them: all, {', '.join(GROUPS)}", often=True, nonempty=True,
               among=("all", *GROUPS, *NAMES)),
    ] = ("all",)  # fmt: skip
    protocol: Annotated[
        Literal["park-kim", "chen", "hyeon-woo", "wang"] | None,
        Option("preset of a publication: diagnostics, images, loss and iteration; options override it", often=True),
    ] = None
    split: Annotated[
        Literal["val", "train", "all"] | None,
        Option("part of the images (default: train for loss, neurons and norms, else val)", "data", often=True),
    ] = None
    max_images: Annotated[
        int | None,
        Option("maximum number of images, drawn by --seed, the same for all models (default: 512)", "data", often=True,
               least=1),
    ] = None  # fmt: skip
    batch_size: EvalBatch = 32
    hessian_images: Annotated[
        int | None, Option("hessian, hessian-blocks, ntk: maximum number of images (default: 64)", least=1)
    ] = None
    hessian_batch: Annotated[
        int | None,
        Option("hessian, hessian-blocks: images per mini-batch; hessian has a spectrum of each (default: 16)", least=1),
    ] = None
    hessian_method: Annotated[
        Literal["lanczos", "power"] | None,
        Option("hessian, hessian-blocks: iteration; power as in the papers (default: lanczos)"),
    ] = None
    hessian_iterations: Annotated[
        int | None, Option("hessian, hessian-blocks: maximum number of iterations (default: 100)", least=1)
    ] = None
    hessian_tol: Annotated[
        float | None, Option("hessian, hessian-blocks: relative tolerance (default: 0.001; 0.01)", above=0)
    ] = None
    top: Annotated[int | None, Option("hessian: eigenvalues per mini-batch (default: 5)", least=1)] = None
    ntk_relu: Annotated[
        bool | None, Option("ntk: ReLU in place of GELU (Chen et al. 2022), or the model's own (default)")
    ] = None
    ntk_init: Annotated[
        bool | None, Option("ntk: of new random weights (Chen et al. 2022), or of the given ones (default)")
    ] = None
    grid: Annotated[
        int | None,
        Option("landscape: grid points along each axis, an odd number (default: 11)", least=3,
               allowed="an odd number, 3 or more"),
    ] = None  # fmt: skip
    span: Annotated[float, Option("landscape: extent of each axis, ± this many filter norms", above=0)] = 1.0
    directions: Annotated[
        Literal["filter", "reference"] | None,
        Option("landscape: normalised per output filter (default; Li et al. 2018), or per input (Park and Kim 2022)"),
    ] = None
    perturb_vectors: Annotated[
        bool | None, Option("landscape: also perturb 1-D tensors (biases, norms), scaled as a whole, or not (default)")
    ] = None
    sigma: Annotated[float, Option("flatness: standard deviation of the noise on the weights", above=0)] = 0.01
    draws: Annotated[
        int | None,
        Option("flatness: number of noise draws, an even number (default: 20)", least=2,
               allowed="an even number, 2 or more"),
    ] = None  # fmt: skip
    loss_images: Annotated[
        Literal["plain", "augmented"] | None,
        Option("hessian, hessian-blocks, landscape: as in evaluation (default), or augmented as in training"),
    ] = None
    weight_decay: Annotated[
        float | None,
        Option("hessian, hessian-blocks, flatness, landscape: weight decay of the l2 term (default: 0)", least=0),
    ] = None
    lesion_convs: Annotated[
        bool | None,
        Option("lesion: remove single spatial convolutions (Park and Kim 2022), or whole blocks of them (default)"),
    ] = None
    corruptions: Annotated[
        tuple[str, ...], Option("corruptions: kinds (default: all)", among=CORRUPTIONS, unique=True)
    ] = ()
    severities: Annotated[
        tuple[int, ...], Option("corruptions: severities, from 1 to 5", nonempty=True, least=1, most=5)
    ] = (1, 3, 5)
    epsilons: Annotated[
        tuple[float, ...] | None,
        Option("attacks: L∞ radii ε, in 1/255 of the pixel range (default: 0.5,1,2,4)", nonempty=True, above=0,
               most=255),
    ] = None  # fmt: skip
    overlay_images: Annotated[int, Option("overlays, rollout: number of images to draw", least=1)] = 8
    device: Device = "auto"
    threads: Threads = None
    workers: Workers = None
    seed: Seed = 0
    out: Annotated[Path, Option("output folder: report.html, analysis.json, figures/", "output", often=True)] = Path(
        "analysis"
    )
    resume: Annotated[
        bool, Option("reuse the results in --out of the same model, images and options", "output",
                     often=True)
    ] = False  # fmt: skip
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        require((self.grid or 3) % 2 == 1, "grid", self.grid, "an odd number, 3 or more: the model is in the middle")
        require((self.draws or 2) % 2 == 0, "draws", self.draws, "an even number, 2 or more: noise comes in pairs")
        if self.resume and self.overwrite:
            raise UsageError("`--resume` continues and `--overwrite` starts again; give one of them")

    def chosen(self) -> tuple[str, ...]:
        """Return the diagnostics that ``what`` selects, each once, in the report's order; ``all`` is the protocol's."""
        every = NAMES if self.protocol is None else tuple(PROTOCOLS[self.protocol].settings)
        known = {"all": every, **GROUPS, **{name: (name,) for name in NAMES}}
        wanted = {one for name in self.what for one in known[name]}
        return tuple(name for name in NAMES if name in wanted)

    @property
    def named(self) -> frozenset[str]:
        """The diagnostics that were requested by name, not through a group."""
        return frozenset(self.what) & frozenset(NAMES)


@dataclass(frozen=True, kw_only=True)
class AnalyzeCommand(AnalyzeConfig):
    """``vtk analyze``: one model, or two side by side, and the options of the analysis."""

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
        """Return the keywords of `vtk.open_source` beside the source."""
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
            raise UsageError("no model was given; give a pack, a checkpoint or a timm model name, or --compare A B")
