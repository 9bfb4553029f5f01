"""What a command or a function was given: a pack, a checkpoint, an exported file, a timm model name, or a model.

Nothing is ever unpickled here: a .pth or .pt file is refused with what to do instead.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from vtk.card import Card, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.files import existing_dir
from vtk.options.config import set_value
from vtk.options.option import show
from vtk.options.shared import SourceOptions
from vtk.runtime.export_facts import PLAIN, Facts

if TYPE_CHECKING:
    from torch import nn

    from vtk.packs.load import Task

    Openable: TypeAlias = "str | Path | Source | Task | nn.Module"
    """What `open_source` takes."""

Kind = Literal["pack", "checkpoint", "onnx", "aoti", "tensorrt", "timm", "module"]
MODELS = ("pack", "checkpoint", "timm", "module")
"""Kinds of sources that are a model in torch."""
_FILES = {"onnx": "ONNX file", "aoti": "AOTInductor file", "tensorrt": "engine"}
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
        trust: run machine code (a .pt2, a TensorRT engine) of a folder, too, and not only of a file that is named.
    """

    base: str | Path | None
    pretrained: bool
    num_classes: int | None
    img_size: int | tuple[int, int] | None
    seed: int
    classes: Sequence[str] | None
    trust: bool


@dataclass(frozen=True)
class Source:
    """Something that can be run.

    Attributes:
        kind: what was recognised.
        name: short, for tables: the run's or the file's name, timm's, or a module's class.
        path: of the pack folder or the file; None for a timm name and a module.
        card: preprocessing, classes and how it was trained.
        described: whether the classes have names. If not (a timm name, a module, an .onnx of another program) the card
            was filled in from shapes: they are only their indices, and for an .onnx the mean and std unknown.
        notes: lines to say to the user, for instance which folder was taken.
        facts: of an ONNX file, what its export did beyond the card, for instance its precision.
        tasks: names of those that one file of many tasks holds, in the order of their numbers.
        held: a task or module in memory, which is what runs.
        trusted: its machine code may be run: the file itself was named, or ``trust`` given.
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
    _options: dict[str, Any] = field(default_factory=dict, repr=False)

    def model(self) -> "nn.Module":
        """Return a new model: fp32, on the CPU, in eval mode. The caller may change it.

        Raises:
            DataError: the file is damaged, or the base of a pack is not found or another one.
            UsageError: an ONNX file holds no torch model, or a module in memory cannot be copied.
        """
        from vtk.models.create import build_model
        from vtk.packs.load import Task, load_checkpoint, load_task

        if self.held is not None:
            from vtk.runtime.in_memory import copy_module

            return copy_module(self.held.model if isinstance(self.held, Task) else self.held)
        if self.kind == "pack" and self.path:
            model = load_task(self.path, base=self._options.get("base")).model
        elif self.kind == "checkpoint" and self.path:
            model = load_checkpoint(self.path).model
        elif self.kind == "timm":
            model = build_model(self.name, num_classes=len(self.card.classes), **self._options).model
        else:
            raise UsageError(
                f"{self.name} is an {_FILES[self.kind]}, not a torch model; give the pack it was made from"
            )
        return model.eval()

    @property
    def base(self) -> Path | None:
        """Base weights of a pack that were given in place of the recorded ones."""
        base: Path | None = self._options.get("base")
        return base

    @property
    def random_classifier(self) -> bool:
        """Whether it is a timm name whose classifier is random numbers: without weights, or of other classes."""
        if self.kind != "timm":
            return False
        from vtk.models.inputs import blank_model

        config = getattr(blank_model(self.name), "pretrained_cfg", None) or {}
        return not self._options["pretrained"] or len(self.card.classes) != config.get("num_classes")

    def require_trust(self, file: Path) -> None:
        """Refuse to run machine code that was only come upon: in a folder, or beside the file that was named.

        Raises:
            UsageError: names the file, and the word that trusts it.
        """
        if not self.trusted:
            raise UsageError(
                f"{file} is machine code, which can do whatever you can, and was not named itself; if you trust it, "
                "give the path of that file, or --trust (in Python: trust=True)"
            )

    def require_description(self, command: str) -> None:
        """Refuse a source without a card of its own.

        Raises:
            UsageError: says what is missing and what to give instead.
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


def open_source(
    source: "Openable",
    *,
    base: str | Path | None = None,
    pretrained: bool = True,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    seed: int = 0,
    many: bool = False,
    classes: Sequence[str] | None = None,
    trust: bool = False,
) -> Source:
    """Recognise what ``source`` is; weights are not read yet, except of an .onnx file.

    Args:
        source: a pack folder, a run folder (its ``task`` is taken), a merged .safetensors, an .onnx, .pt2 or TensorRT
            file, a folder with ``model.onnx`` or ``model.safetensors``, or a timm model name. In memory: a `Task`; a
            module that maps images (B, C, H, W) to logits (B, classes), which is copied to be run and never changed; or
            a source, which is returned as it is.
        base: base weights of a pack, in place of the recorded ones.
        pretrained: timm name only: weights of the hub, else random ones.
        num_classes: timm name only: another number of classes than the weights have.
        img_size: pixels, height first, of a timm name, or of a module that does not say it itself.
        seed: timm name only: of random weights.
        many: an .onnx file of many tasks may be it.
        classes: names of the classes of a timm name or a module, in the order of their logits.
        trust: machine code (a .pt2, a TensorRT engine) may be run wherever it was found; by default only a file whose
            own path is ``source``.

    Raises:
        UsageError: neither a file nor a timm model, an option that this kind of source does not take, or a module whose
            input cannot be known.
        DataError: a file that is damaged, pickled, or carries no card.
    """
    base, pretrained = set_value(SourceOptions, "base", base), set_value(SourceOptions, "pretrained", pretrained)
    num_classes = set_value(SourceOptions, "num_classes", num_classes)
    img_size, classes = set_value(SourceOptions, "img_size", img_size), _names(classes)
    trust = set_value(SourceOptions, "trust", trust)
    options: dict[str, Any] = {"num_classes": num_classes, "img_size": img_size, "classes": classes}
    options["pretrained"] = None if pretrained else False
    if not isinstance(source, (str, Path)):
        return _open_held(source, options | {"base": base})
    path = Path(source).expanduser()
    found = path if path.exists() else existing_dir(path)
    if found.exists():
        for name, given in options.items():
            if given is not None:
                flag = {"pretrained": "--no-pretrained", "classes": "classes"}.get(name, f"--{name.replace('_', '-')}")
                raise UsageError(f"`{flag}` is for timm model names; {path} says itself what it is")
        opened = _open_path(path, found, many=many)
        if base is not None and opened.kind != "pack":
            raise UsageError(f"`--base` is for task packs; {path} is complete without one")
        named = opened.kind in ("aoti", "tensorrt") and found.is_file()
        return dataclasses.replace(
            opened, trusted=trust or named, _options={"base": None if base is None else Path(base)}
        )
    text = str(source)
    # timm's names have a slash only after `hf-hub:`
    has_folder = path.is_absolute() or text.startswith((".", "~")) or ("/" in text and ":" not in text)
    if has_folder or path.suffix in (".onnx", ".pt2", ".safetensors", *ENGINES, *_PICKLES):
        raise DataError(f"{path} does not exist")
    if base is not None:
        raise UsageError(f"`--base` is for task packs; `{text}` is not a folder here")
    return _open_timm(text, pretrained, num_classes, img_size, seed, classes)


def _names(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names of classes as a tuple."""
    if classes is None:
        return None
    if isinstance(classes, (str, bytes)) or not isinstance(classes, Iterable):
        raise UsageError(f"`classes` is {show(classes)}; give a list of names, one for each logit in order")
    return tuple(map(str, classes))


def _open_held(source: "Source | Task | nn.Module", options: Mapping[str, Any]) -> Source:
    """Open what is in memory; ``options`` that are not None were given."""
    from torch import nn

    from vtk.packs.load import Task
    from vtk.runtime.in_memory import open_module, open_task

    what = "an open source" if isinstance(source, Source) else f"a {type(source).__name__} in memory"
    known = ("img_size", "classes") if isinstance(source, nn.Module) else ()
    if refused := [name for name, value in options.items() if value is not None and name not in known]:
        raise UsageError(f"`{refused[0]}` does not go with {what}, which says itself what it is; leave it out")
    if isinstance(source, Source):
        return source
    if isinstance(source, Task):
        return open_task(source)
    if isinstance(source, nn.Module):
        return open_module(source, img_size=options["img_size"], classes=options["classes"])
    raise UsageError(f"{what} cannot be opened; give a path, a timm model name, a Task, an nn.Module or a Source")


def _open_path(path: Path, found: Path, *, many: bool = False) -> Source:
    from vtk.packs.cards import read_card
    from vtk.runtime.onnx_file import open_onnx

    if found.is_file():
        if found.suffix == ".onnx":
            return open_onnx(found, many=many)
        if found.suffix == ".pt2":
            from vtk.runtime.backends.aoti_backend import open_aoti

            return open_aoti(found)
        if found.suffix in ENGINES:
            from vtk.runtime.engine_files import open_engine

            return open_engine(found)
        if found.suffix in _PICKLES:
            raise DataError(
                f"{path} is a pickle, which can run code when read; give a pack, a merged .safetensors or an .onnx "
                "(as base weights it can serve: `vtk finetune --weights`)"
            )
        if found.name in ("task.json", "task.safetensors", "base_tensors.json"):
            return _open_path(path.parent, found.parent)
        if found.suffix == ".safetensors":
            name = found.parent.name if found.stem == "model" and found.parent.name else found.stem
            card = read_card(found)
            if not card.classes:
                raise DataError(
                    f"{path} is a backbone without a classifier, as `vtk pretrain` writes it; fine-tune from it: "
                    f"vtk finetune DATA --model {card.model.name} --weights {path}"
                )
            return Source("checkpoint", name, found, card)
        raise DataError(f"{path} is none of: task pack, merged .safetensors, .onnx, .pt2, TensorRT engine")
    run_note = f"{path} is a run folder; its best pack is taken: {path / 'task'}"
    for folder, note in ((found, ""), (existing_dir(found / "task"), run_note)):
        if (folder / "task.json").is_file():
            return Source("pack", pack_name(folder), folder, read_card(folder), notes=(note,) if note else ())
    if (found / "model.onnx").is_file():
        return open_onnx(found / "model.onnx")
    if (found / "model.pt2").is_file():
        return _open_path(path / "model.pt2", found / "model.pt2")
    if (found / "model.safetensors").is_file():  # of `vtk parallelize`
        return _open_path(path / "model.safetensors", found / "model.safetensors")
    if (found / "backbone.safetensors").is_file():  # of `vtk pretrain`
        return _open_path(path / "backbone.safetensors", found / "backbone.safetensors")
    if (found / "adapter_config.json").is_file():
        raise DataError(f"{path} is a PEFT adapter; `vtk tasks from-peft {path} --out PACK` makes a pack of it")
    if files := sorted(file.name for file in found.glob("*.onnx")):
        raise DataError(f"{path} is a folder of several models; give one of its files, such as {path / files[0]}")
    raise DataError(f"{path} is a folder without task.json, task/task.json or model.onnx; give a pack or a run folder")


def pack_name(folder: Path) -> str:
    """Return what a pack is called in tables: as its run, or its folder."""
    return folder.parent.name if folder.name == "task" and folder.parent.name else folder.name


def _open_timm(
    name: str,
    pretrained: bool,
    num_classes: int | None,
    img_size: int | tuple[int, int] | None,
    seed: int,
    classes: Sequence[str] | None,
) -> Source:
    from vtk.models.inputs import blank_model, input_spec

    try:
        config = getattr(blank_model(name), "pretrained_cfg", None) or {}
    except UsageError as error:
        raise UsageError(f"`{name}` is no file or folder here, and as a model name: {error}") from error
    if classes is not None:
        if num_classes not in (None, len(classes)) or len(set(classes)) != len(classes):
            raise UsageError(f"`classes` has {len(set(classes))} different names; give one for each class, and no "
                             "num_classes")  # fmt: skip
        num_classes = len(classes)
    count = config.get("num_classes", 1000) if num_classes is None else num_classes
    if not count or count < 1:
        raise UsageError(f"`{name}` has no classifier of its own; give --num-classes N")
    spec = input_spec(name, None, img_size)
    card = Card(ModelSpec(name), spec, tuple(map(str, classes or range(count))))
    options = {"img_size": img_size, "pretrained": pretrained, "seed": seed}
    return Source("timm", name, None, card, described=classes is not None, _options=options)
