"""Options of ``vtk analyze``; free of torch."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.analysis.diagnostics.names import CORRUPTIONS, GROUPS, NAMES
from vtk.errors import UsageError
from vtk.evaluation.config import check_threads


@dataclass(frozen=True)
class AnalyzeConfig:
    """What to look at, on which images, and where the report goes.

    Raises:
        UsageError: a value is out of range, unknown or contradicts another.
    """

    model: str = field(
        default="", metadata={"help": "a task pack, a run folder, a merged checkpoint or a timm model name"}
    )
    data: Path | None = field(default=None, metadata={"help": "folder with train/ and val/, or with one per class"})
    what: tuple[str, ...] = field(
        default=("all",),
        metadata={
            "help": "diagnostics by name, or a group of them: "
            + "; ".join(f"{group} ({', '.join(names)})" for group, names in GROUPS.items())
        },
    )
    compare: tuple[str, str] | None = field(
        default=None,
        metadata={"help": "two models side by side, or two folders that this command has written, for instance a base "
                  "and its pack"},
    )  # fmt: skip
    split: Literal["val", "train", "all"] = field(default="val", metadata={"help": "which images"})
    max_images: int = field(default=512, metadata={"help": "at most so many, drawn by --seed, the same for all models"})
    batch_size: int = field(default=32, metadata={"help": "images of one forward pass"})
    hessian_images: int = field(
        default=64, metadata={"help": "of hessian, hessian-blocks and ntk: at most so many of the images"}
    )
    hessian_batch: int = field(
        default=16, metadata={"help": "of hessian: images of a mini-batch, each of which has a spectrum (paper C: 16)"}
    )
    top: int = field(default=5, metadata={"help": "of hessian: eigenvalues of each mini-batch (paper C: 5)"})
    grid: int = field(default=11, metadata={"help": "of landscape: points along each of its two axes, an odd number"})
    span: float = field(default=1.0, metadata={"help": "of landscape: from −span to span, in norms of the filters"})
    directions: Literal["filter", "reference"] = field(
        default="filter",
        metadata={"help": "of landscape: scale each output filter (Li et al.), or as paper C's code, each input"},
    )
    perturb_vectors: bool = field(
        default=False, metadata={"help": "of landscape: move 1-D tensors too (biases, norms), scaled as a whole"}
    )
    sigma: float = field(
        default=0.01, metadata={"help": "of flatness: deviation of the noise on the weights, in units of the weights"}
    )
    draws: int = field(default=20, metadata={"help": "of flatness: draws of noise, an even number"})
    loss_images: Literal["plain", "augmented"] = field(
        default="plain",
        metadata={"help": "of hessian and landscape: images as they are evaluated (paper D), or augmented and mixed as "
                  "in training (paper C)"},
    )  # fmt: skip
    weight_decay: float = field(
        default=0.0,
        metadata={"help": "of hessian, flatness and landscape: factor of the l2 term, which paper C insists on"},
    )
    corruptions: tuple[str, ...] = field(
        default=(), metadata={"help": f"of corruptions: only these of {', '.join(CORRUPTIONS)}; by default all"}
    )
    severities: tuple[int, ...] = field(default=(1, 3, 5), metadata={"help": "of corruptions: strengths from 1 to 5"})
    epsilons: tuple[float, ...] = field(
        default=(0.5, 1.0, 2.0, 4.0),
        metadata={"help": "of attacks: radii of the L∞ ball, in 255ths of the pixel range"},
    )
    overlay_images: int = field(default=8, metadata={"help": "of overlays and rollout: images that are drawn"})
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "of a timm model: N, or height and width; packs and checkpoints know theirs"}
    )
    pretrained: bool = field(default=True, metadata={"help": "of a timm model: weights of the hub, or random ones"})
    num_classes: int | None = field(default=None, metadata={"help": "of a timm model: classes of a new, random head"})
    base: Path | None = field(default=None, metadata={"help": "base weights of a pack, if they moved"})
    device: str = field(default="auto", metadata={"help": "auto (CUDA if there is one), cpu, cuda or cuda:N"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of one operation"})
    workers: int | None = field(default=None, metadata={"help": "processes that decode images; default: one per core"})
    seed: int = field(default=0, metadata={"help": "of the choice of images, of directions, noise and start vectors"})
    out: Path = field(
        default=Path("analysis"), metadata={"help": "folder for report.html, analysis.json, results/ and figures/"}
    )
    resume: bool = field(
        default=False,
        metadata={"help": "go on in --out: what is there of the same model, images and options is not done again"},
    )
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that is not empty"})

    def __post_init__(self) -> None:
        if self.compare and self.model:
            raise UsageError(f"`--compare` names both models; leave out {self.model}")
        if not self.compare and not self.model:
            raise UsageError("no model; give a pack, a checkpoint or a timm model name, or --compare A B")
        self.chosen()
        for name in ("max_images", "batch_size", "hessian_images", "hessian_batch", "top", "overlay_images"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"`--{name.replace('_', '-')}` is {value}; give at least 1")
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"`--workers` is {self.workers}; give at least 0")
        if self.num_classes is not None and self.num_classes < 1:
            raise UsageError(f"`--num-classes` is {self.num_classes}; give at least 1")
        if self.grid < 3 or self.grid % 2 == 0:
            raise UsageError(f"`--grid` is {self.grid}; give an odd number, 3 or more: the model is in the middle")
        for name in ("span", "sigma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"`--{name}` is {value}; give a number above 0")
        if self.draws < 2 or self.draws % 2:
            raise UsageError(f"`--draws` is {self.draws}; noise comes in pairs: give an even number, 2 or more")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise UsageError(f"`--weight-decay` is {self.weight_decay}; give 0 or above")
        if unknown := [kind for kind in self.corruptions if kind not in CORRUPTIONS]:
            raise UsageError(f"`--corruptions` {unknown[0]} is not known; choose {', '.join(CORRUPTIONS)}")
        if not self.severities or not all(1 <= value <= 5 for value in self.severities):
            raise UsageError(f"`--severities` {self._shown(self.severities)}: give numbers from 1 to 5")
        if not self.epsilons or not all(0 < value <= 255 for value in self.epsilons):
            raise UsageError(f"`--epsilons` {self._shown(self.epsilons)}: give numbers above 0, at most 255")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"`--seed` is {self.seed}; give 0 to {2**63 - 1}")
        if self.resume and self.overwrite:
            raise UsageError("`--resume` goes on and `--overwrite` starts anew; give one of them")
        check_threads(self.threads)

    def chosen(self) -> tuple[str, ...]:
        """Return the diagnostics that ``what`` names, each once, in the report's order.

        Raises:
            UsageError: a name is unknown, or there is none.
        """
        known = {"all": NAMES, **GROUPS, **{name: (name,) for name in NAMES}}
        for name in self.what:
            if name not in known:
                raise UsageError(f"`--what` {name} is not known; choose all, {', '.join((*GROUPS, *NAMES))}")
        if not self.what:
            raise UsageError(f"`--what` names nothing; choose all, {', '.join((*GROUPS, *NAMES))}")
        wanted = {one for name in self.what for one in known[name]}
        return tuple(name for name in NAMES if name in wanted)

    @property
    def named(self) -> frozenset[str]:
        """The diagnostics that were asked for one by one, not by a group's name."""
        return frozenset(self.what) & frozenset(NAMES)

    @staticmethod
    def _shown(values: tuple[float, ...]) -> str:
        return ",".join(f"{value:g}" for value in values) or "names nothing"
