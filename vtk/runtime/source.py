"""Sources of models as data: a pack, a checkpoint, an exported file, a timm model name, or a module in memory.

Nothing is ever unpickled here: a .pth or .pt file is refused with what to do instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from vtk._moved import moved_names
from vtk.card import Card
from vtk.errors import UsageError
from vtk.runtime.export_facts import PLAIN, Facts

if TYPE_CHECKING:
    from torch import nn

    from vtk.packs.load import Task

    Openable: TypeAlias = "str | Path | Source | Task | nn.Module"
    """What `open_source` takes."""

Kind = Literal["pack", "checkpoint", "onnx", "openvino", "aoti", "tensorrt", "timm", "module"]
MODELS = ("pack", "checkpoint", "timm", "module")
"""Kinds of sources that are a model in torch."""
_FILES = {"onnx": "ONNX file", "openvino": "OpenVINO model", "aoti": "AOTInductor file", "tensorrt": "engine"}
ENGINES = (".engine", ".plan", ".trt")
"""Suffixes of TensorRT engines."""
_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle")


class Opening(TypedDict, total=False):
    """How to open a source: the keyword arguments of `open_source` that library functions take beside their config.

    Attributes:
        base: base weights of a pack, in place of the recorded ones.
        pretrained: timm name only: weights of the hub, else random ones.
        num_classes: timm name only: another number of classes than the weights have.
        img_size: timm name or module: pixels, height first.
        seed: timm name only: of random weights.
        classes: timm name or module: names of the classes.
        trust: allow machine code (a .pt2, a TensorRT engine) of a folder, too, not only of a file that is named itself.
        weights: timm name only: a file or folder of weights, in place of the hub's.
    """

    base: str | Path | None
    pretrained: bool
    num_classes: int | None
    img_size: int | tuple[int, int] | None
    seed: int
    classes: Sequence[str] | None
    trust: bool
    weights: str | Path | None


@dataclass(frozen=True)
class Source:
    """A model that can be run, and where it comes from.

    Attributes:
        kind: of the source.
        name: short, for tables: the run's or the file's name, timm's, or a module's class.
        path: of the pack folder or the file; None for a timm name and a module.
        card: preprocessing, classes and how it was trained.
        described: whether the classes have names. If not (a timm name, a module, an .onnx of another program), the card
            is filled in from shapes: classes are numbers, and of an .onnx mean and std are unknown.
        notes: lines for the user, for instance which folder is used.
        facts: of an exported file, for instance its precision.
        tasks: of a file of many tasks, their names in the order of their numbers.
        held: a task or module in memory.
        trusted: its machine code may be run, because the file itself was named or ``trust`` given.
        features: whether the model ends before its classifier: it gives the pooled features (B, channels).
    """

    kind: Kind
    name: str
    path: Path | None
    card: Card
    described: bool = True
    notes: tuple[str, ...] = ()
    facts: Facts = PLAIN
    tasks: tuple[str, ...] = ()
    held: "Task | nn.Module | None" = field(default=None, repr=False, compare=False)
    trusted: bool = False
    features: bool = False
    _options: dict[str, Any] = field(default_factory=dict, repr=False)

    def model(self) -> "nn.Module":
        """Return a new model: fp32, on the CPU, in eval mode. The caller may change it.

        Raises:
            DataError: the file is damaged, or no base of a pack fits.
            UsageError: an ONNX file holds no torch model, or a module in memory cannot be copied.
        """
        from vtk.models.create import build_model
        from vtk.packs.load import Task, load_checkpoint, load_task

        if self.held is not None:
            from vtk.runtime.module_copy import copy_module

            model = copy_module(self.held.model if isinstance(self.held, Task) else self.held)
        elif self.kind == "pack" and self.path:
            model = load_task(self.path, base=self._options.get("base")).model
        elif self.kind == "checkpoint" and self.path:
            model = load_checkpoint(self.path).model
        elif self.kind == "timm":
            model = build_model(self.name, num_classes=len(self.card.classes), **self._options).model
        else:
            raise UsageError(
                f"{self.name} is an {_FILES[self.kind]}, not a torch model; give the pack it was made from"
            )
        if self.features:
            from vtk.models.pooled_features import without_classifier

            model = without_classifier(model)
        return model.eval()

    @property
    def base(self) -> Path | None:
        """Base weights of a pack that were given in place of the recorded ones."""
        base: Path | None = self._options.get("base")
        return base

    @property
    def random_classifier(self) -> bool:
        """Whether it is a timm name with a random classifier: without weights, or with another number of classes."""
        if self.kind != "timm" or self.features:
            return False
        from vtk.models.inputs import blank_model

        config = getattr(blank_model(self.name), "pretrained_cfg", None) or {}
        return not self._options["pretrained"] or len(self.card.classes) != config.get("num_classes")

    def require_trust(self, file: Path) -> None:
        """Refuse to run machine code that was found in a folder, or beside the file that was named.

        Raises:
            UsageError: names the file and the option.
        """
        if not self.trusted:
            raise UsageError(
                f"{file} is machine code, which runs with all your permissions, and was not named itself; if you trust "
                "it, give the path of that file, or --trust (in Python: trust=True)"
            )

    def require_description(self, command: str) -> None:
        """Refuse a source without a card of its own.

        Raises:
            UsageError: names what is missing and what to give.
        """
        if self.described:
            return
        if self.kind == "timm":
            lacks, give = "has no class names", "fine-tune it first (`vtk finetune`) and give the pack"
        elif self.kind == "module":
            lacks, give = "is a module without class names", "open it with classes=[…], a name for each logit"
        else:
            lacks = "carries no vtk card, so its class names, mean and std are unknown"
            give = "give a file made by `vtk export onnx`, or the pack"
        raise UsageError(f"`vtk {command}`: {self.name} {lacks}; {give}")


def pack_name(folder: Path) -> str:
    """Return the name of a pack in tables: that of its run, or of its folder."""
    return folder.parent.name if folder.name == "task" and folder.parent.name else folder.name


if not TYPE_CHECKING:  # else a type checker takes any name for one of this module
    __getattr__ = moved_names(__name__, {"open_source": "vtk.runtime.opening"})
