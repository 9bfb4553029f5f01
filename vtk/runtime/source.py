"""What a command was given: a task pack, a merged checkpoint, an ONNX file or a timm model name.

Nothing is ever unpickled here: a .pth or .pt file is refused with what to do instead.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.files import existing_dir
from vtk.packages import require
from vtk.runtime.data_files import check_data_files
from vtk.runtime.facts import PLAIN, Facts, read_facts

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["pack", "checkpoint", "onnx", "aoti", "tensorrt", "timm"]
_FILES = {"onnx": "ONNX file", "aoti": "AOTInductor file", "tensorrt": "engine"}
ENGINES = (".engine", ".plan", ".trt")
"""Suffixes of TensorRT engines."""
_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Source:
    """Something that can be run.

    Attributes:
        kind: what was recognised.
        name: short, for tables: the run's or the file's name, or timm's.
        path: of the pack folder or the file; None for a timm name.
        card: preprocessing, classes and how it was trained.
        described: whether the card came with the artefact. If not (a timm name, an .onnx of another program) it was
            filled in from shapes: the classes are then only their indices, and for an .onnx the mean and std unknown.
        notes: lines to say to the user, for instance which folder was taken.
        facts: of an ONNX file, what its export did beyond the card, for instance its precision.
        tasks: names of those that one file of many tasks holds, in the order of their numbers.
    """

    kind: Kind
    name: str
    path: Path | None
    card: Card
    described: bool = True
    notes: tuple[str, ...] = ()
    facts: Facts = PLAIN
    tasks: tuple[str, ...] = ()
    _options: dict[str, Any] = field(default_factory=dict, repr=False)

    def model(self) -> "nn.Module":
        """Return a new model: fp32, on the CPU, in eval mode. The caller may change it.

        Raises:
            DataError: the file is damaged, or the base of a pack is not found or another one.
            UsageError: an ONNX file holds no torch model.
        """
        from vtk.models.create import create_model
        from vtk.tasks.load import load_checkpoint, load_task

        if self.kind == "pack" and self.path:
            model = load_task(self.path, base=self._options.get("base")).model
        elif self.kind == "checkpoint" and self.path:
            model = load_checkpoint(self.path).model
        elif self.kind == "timm":
            model = create_model(self.name, num_classes=len(self.card.classes), **self._options).model
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

    def require_description(self, command: str) -> None:
        """Refuse a source without a card of its own.

        Raises:
            UsageError: says what is missing and what to give instead.
        """
        if self.described:
            return
        if self.kind == "timm":
            lacks, give = "has no class names", "fine-tune it first (`vtk finetune`) and give the pack"
        else:
            lacks = "carries no vtk card, so its class names, mean and std are unknown"
            give = "give a file made by `vtk export onnx`, or the pack"
        raise UsageError(f"`vtk {command}`: {self.name} {lacks}; {give}")


def open_source(
    text: str | Path,
    *,
    base: Path | None = None,
    pretrained: bool = True,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    seed: int = 0,
    many: bool = False,
) -> Source:
    """Recognise what ``text`` names; weights are not read yet, except of an .onnx file.

    Args:
        text: a pack folder, a run folder (its ``task`` is taken), a merged .safetensors, an .onnx, .pt2 or TensorRT
            file, a folder with ``model.onnx`` or ``model.safetensors``, or a timm model name.
        base: base weights of a pack, in place of the recorded ones.
        pretrained: timm name only: weights of the hub, else random ones.
        num_classes: timm name only: another number of classes than the weights have.
        img_size: timm name only: pixels, height first.
        seed: timm name only: of random weights.
        many: an .onnx file of many tasks may be it.

    Raises:
        UsageError: neither a file nor a timm model, or a flag that this kind of source does not take.
        DataError: a file that is damaged, pickled, or carries no card.
    """
    path = Path(text).expanduser()
    found = path if path.exists() else existing_dir(path)
    if found.exists():
        flags = {"--num-classes": num_classes, "--img-size": img_size, "--no-pretrained": None if pretrained else True}
        for flag, given in flags.items():
            if given is not None:
                raise UsageError(f"`{flag}` is for timm model names; {path} says itself what it is")
        source = _open_path(path, found, many=many)
        if base is not None and source.kind != "pack":
            raise UsageError(f"`--base` is for task packs; {path} is complete without one")
        return dataclasses.replace(source, _options={"base": base})
    # timm's names have a slash only after `hf-hub:`
    has_folder = path.is_absolute() or str(text).startswith((".", "~")) or ("/" in str(text) and ":" not in str(text))
    if has_folder or path.suffix in (".onnx", ".pt2", ".safetensors", *ENGINES, *_PICKLES):
        raise DataError(f"{path} does not exist")
    if base is not None:
        raise UsageError(f"`--base` is for task packs; `{text}` is not a folder here")
    return _open_timm(str(text), pretrained=pretrained, num_classes=num_classes, img_size=img_size, seed=seed)


def open_onnx(path: Path, *, many: bool = False) -> Source:
    """Read the card of an ONNX file, or fill one in from its shapes.

    Args:
        path: the file.
        many: a file of many tasks may be it, which needs a task's number with each image.

    Raises:
        UsageError: a file of many tasks where only one task's will do.
        DataError: not an ONNX file, weights beside it that are not whole, or no images of a fixed size as its input.
    """
    require("onnx", "google.protobuf")
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        proto = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable ONNX file ({error})") from error
    check_data_files(proto, path)
    name = path.parent.name if path.stem == "model" and path.parent.name else path.name
    meta = {entry.key: entry.value for entry in proto.metadata_props}
    types = {value.name: value.type.tensor_type for value in (*proto.graph.input, *proto.graph.output)}
    shapes = {
        name: [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim] for name, kind in types.items()
    }
    if "task" in shapes and not many:
        raise UsageError(
            f"{path} holds many tasks and is run with a `task` beside each image; give the .onnx file of one task "
            "(`vtk export tasks --form files`, or both), or a pack"
        )
    image = shapes.get("pixel_values", [])
    logits = shapes.get("logits", shapes.get("probabilities", []))
    if "vtk" in meta:
        card, facts = Card.from_json(meta["vtk"], path), read_facts(meta, path)
        told = [card.input.in_chans, *card.input.size, len(card.classes)]
        found = [*image[1:], *logits[1:]]
        # what a raw image, a size of any number, or an output of features leaves out has nothing to be held against
        told = told if image or not facts.preprocessing else told[3:]
        told = told if logits or "features" not in shapes else told[:-1]
        if facts.dynamic_size and image:
            found, told = [found[0], *found[3:]], [told[0], *told[3:]]
        if found != told:
            raise DataError(
                f"{path}: its card says (channels, height, width, classes) {told}, its graph {found}; it was edited, "
                "export it again"
            )
        return Source("onnx", name, path, card, notes=facts.notes(), facts=facts)
    if len(image) != 4 or not all(image[1:]) or len(logits) != 2 or not logits[1]:
        raise DataError(
            f"{path} has the inputs and outputs {shapes}; this toolkit runs `pixel_values` (batch, channels, height, "
            "width) with a fixed size to `logits` (batch, classes)"
        )
    chans, height, width = (d or 0 for d in image[1:])
    spec = InputSpec(height, width, chans, mean=(0.0,) * chans, std=(1.0,) * chans)
    cards = _tasks_of(meta, path) if "task" in shapes else {}
    # tasks of one file have one size, and their normalisation draws images like those they were trained on
    spec = next(iter(cards.values())).input if cards else spec
    card = Card(ModelSpec("onnx"), spec, tuple(str(i) for i in range(logits[1])))
    precision = {onnx.TensorProto.FLOAT16: "fp16", onnx.TensorProto.BFLOAT16: "bf16"}
    kind = precision.get(types["pixel_values"].elem_type, "fp32")
    return Source("onnx", name, path, card, described=False, facts=Facts(kind), tasks=tuple(cards))


def _tasks_of(meta: Mapping[str, str], path: Path) -> dict[str, Card]:
    """Read the tasks of a file of many: name to card, in the order of their numbers."""
    try:
        listed = json.loads(meta["vtk.tasks"])["tasks"]
        return {entry["name"]: Card.from_json(json.dumps(entry["card"]), path) for entry in listed}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} takes a `task` and does not say which there are; give a file of `vtk export tasks`"
        ) from error


def _open_path(path: Path, found: Path, *, many: bool = False) -> Source:
    from vtk.tasks.load import read_card

    if found.is_file():
        if found.suffix == ".onnx":
            return open_onnx(found, many=many)
        if found.suffix == ".pt2":
            from vtk.runtime.aoti_backend import open_aoti

            return open_aoti(found)
        if found.suffix in ENGINES:
            from vtk.runtime.engine import open_engine

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
            name = folder.parent.name if folder.name == "task" and folder.parent.name else folder.name
            return Source("pack", name, folder, read_card(folder), notes=(note,) if note else ())
    if (found / "model.onnx").is_file():
        return open_onnx(found / "model.onnx")
    if (found / "model.pt2").is_file():
        return _open_path(path / "model.pt2", found / "model.pt2")
    if (found / "model.safetensors").is_file():  # of `vtk parallelize`
        return _open_path(path / "model.safetensors", found / "model.safetensors")
    if (found / "backbone.safetensors").is_file():  # of `vtk pretrain`
        return _open_path(path / "backbone.safetensors", found / "backbone.safetensors")
    raise DataError(f"{path} is a folder without task.json, task/task.json or model.onnx; give a pack or a run folder")


def _open_timm(
    name: str, *, pretrained: bool, num_classes: int | None, img_size: int | tuple[int, int] | None, seed: int
) -> Source:
    from vtk.models.inputs import blank_model, input_spec

    try:
        config = getattr(blank_model(name), "pretrained_cfg", None) or {}
    except UsageError as error:
        raise UsageError(f"`{name}` is no file or folder here, and as a model name: {error}") from error
    count = config.get("num_classes", 1000) if num_classes is None else num_classes
    if not count or count < 1:
        raise UsageError(f"`{name}` has no classifier of its own; give --num-classes N")
    spec = input_spec(name, None, img_size)
    card = Card(ModelSpec(name), spec, tuple(str(i) for i in range(count)))
    options = {"img_size": img_size, "pretrained": pretrained, "seed": seed}
    return Source("timm", name, None, card, described=False, _options=options)
