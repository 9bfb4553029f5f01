"""Recognises the kind of a source and opens it: `open_source`.

Nothing is unpickled: a .pth or .pt file is refused with advice.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vtk import console
from vtk.card import Card, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.files import existing_dir
from vtk.options.config import set_value
from vtk.options.option import show
from vtk.options.shared import SourceOptions
from vtk.runtime.source import ENGINES, Opening, Source, pack_name

if TYPE_CHECKING:
    from torch import nn

    from vtk.packs.load import Task
    from vtk.runtime.source import Openable

_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle")


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
    weights: str | Path | None = None,
    features: bool = False,
) -> Source:
    """Recognise the kind of ``source`` and read its card; weights are not read yet, except of an .onnx file.

    Args:
        source: a pack folder, a run folder (its ``task`` is used), a merged .safetensors, an .onnx, OpenVINO .xml, .pt2
            or TensorRT file, a folder with ``model.onnx``, ``model.xml`` or ``model.safetensors``, or a timm model
            name. In memory: a `Task`; a module that maps images (B, C, H, W) to logits (B, classes), which is copied to
            be run and never changed; or a source, which is returned as it is.
        base: base weights of a pack, in place of the recorded ones.
        pretrained: timm name only: weights of the hub, else random ones.
        num_classes: timm name only: another number of classes than the weights have.
        img_size: pixels, height first, of a timm name, or of a module that does not have it.
        seed: timm name only: of random weights.
        many: accept an .onnx file of many tasks.
        classes: names of the classes of a timm name or a module, in the order of their logits.
        trust: allow machine code (a .pt2, a TensorRT engine) of a folder, too; by default only of a file whose own path
            is ``source``.
        weights: timm name only: a file or folder of weights, in place of the hub's.
        features: the model ends before its classifier and gives the pooled features (B, channels); it may be a backbone
            that has no classifier. An exported file must have them among its outputs.

    Raises:
        UsageError: neither a file nor a timm model, an option that this kind of source does not take, or a module whose
            input size is unknown.
        DataError: a file that is damaged or pickled, or has no card.
    """
    base, pretrained = set_value(SourceOptions, "base", base), set_value(SourceOptions, "pretrained", pretrained)
    num_classes = set_value(SourceOptions, "num_classes", num_classes)
    img_size, classes = set_value(SourceOptions, "img_size", img_size), _names(classes)
    trust = set_value(SourceOptions, "trust", trust)
    options: dict[str, Any] = {"num_classes": num_classes, "img_size": img_size, "classes": classes}
    options["pretrained"] = None if pretrained else False
    options["weights"] = weights = None if weights is None else Path(weights)
    if not isinstance(source, (str, Path)):
        held = _open_held(source, options | {"base": base})
        return dataclasses.replace(held, features=True) if features and not held.features else held
    path = Path(source).expanduser()
    existing = path if path.exists() else existing_dir(path)
    if existing.exists():
        for name, given in options.items():
            if given is not None:
                flag = {"pretrained": "--no-pretrained", "classes": "classes"}.get(name, f"--{name.replace('_', '-')}")
                raise UsageError(f"`{flag}` is for timm model names; {path} says itself what it is")
        opened = _open_path(path, existing, many=many, features=features)
        if base is not None and opened.kind != "pack":
            raise UsageError(f"`--base` is for task packs; {path} is complete without one")
        named = opened.kind in ("aoti", "tensorrt") and existing.is_file()
        return dataclasses.replace(
            opened, trusted=trust or named, features=features, _options={"base": None if base is None else Path(base)}
        )
    text = str(source)
    # timm's names have a slash only after `hf-hub:`
    has_folder = path.is_absolute() or text.startswith((".", "~")) or ("/" in text and ":" not in text)
    if has_folder or path.suffix in (".onnx", ".xml", ".pt2", ".safetensors", *ENGINES, *_PICKLES):
        raise DataError(f"{path} does not exist")
    if base is not None:
        raise UsageError(f"`--base` is for task packs; `{text}` is not a folder here")
    return _open_timm(text, pretrained, num_classes, img_size, seed, classes, weights, features)


def _names(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names of classes as a tuple."""
    if classes is None:
        return None
    if isinstance(classes, (str, bytes)) or not isinstance(classes, Iterable):
        raise UsageError(f"`classes` is {show(classes)}; give a list of names, one for each logit in order")
    return tuple(map(str, classes))


def _open_held(source: "Source | Task | nn.Module", options: Mapping[str, Any]) -> Source:
    """Open a source in memory; ``options`` that are not None were given."""
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


def _open_path(path: Path, existing: Path, *, many: bool = False, features: bool = False) -> Source:
    from vtk.packs.cards import read_card
    from vtk.runtime.onnx_file import open_onnx

    if existing.is_file():
        if existing.suffix == ".onnx":
            return open_onnx(existing, many=many)
        if existing.suffix == ".xml" or (existing.suffix == ".bin" and existing.with_suffix(".xml").is_file()):
            from vtk.runtime.openvino_file import open_openvino

            return open_openvino(existing.with_suffix(".xml"))
        if existing.suffix == ".pt2":
            from vtk.runtime.aoti_file import open_aoti

            return open_aoti(existing)
        if existing.suffix in ENGINES:
            from vtk.runtime.engine_files import open_engine

            return open_engine(existing)
        if existing.suffix in _PICKLES:
            raise DataError(
                f"{path} is a pickle, which can run code when read; give a pack, a merged .safetensors or an .onnx "
                "(as base weights it can serve: `vtk finetune --weights`)"
            )
        if existing.name in ("task.json", "task.safetensors", "base_tensors.json"):
            return _open_path(path.parent, existing.parent, features=features)
        if existing.suffix == ".safetensors":
            name = existing.parent.name if existing.stem == "model" and existing.parent.name else existing.stem
            card = read_card(existing)
            if not card.classes and not features:
                raise DataError(
                    f"{path} is a backbone without a classifier, as `vtk pretrain` writes it; fine-tune from it: "
                    f"vtk finetune DATA --model {card.model.name} --weights {path}; its features: vtk embed"
                )
            return Source("checkpoint", name, existing, card)
        raise DataError(
            f"{path} is none of: task pack, merged .safetensors, .onnx, OpenVINO .xml, .pt2, TensorRT engine"
        )
    run_note = f"{path} is a run folder; its best pack is taken: {path / 'task'}"
    for folder, note in ((existing, ""), (existing_dir(existing / "task"), run_note)):
        if (folder / "task.json").is_file():
            return Source("pack", pack_name(folder), folder, read_card(folder), notes=(note,) if note else ())
    if (existing / "model.onnx").is_file():
        return open_onnx(existing / "model.onnx")
    if (existing / "model.xml").is_file():
        return _open_path(path / "model.xml", existing / "model.xml")
    if (existing / "model.pt2").is_file():
        return _open_path(path / "model.pt2", existing / "model.pt2")
    if (existing / "model.safetensors").is_file():  # of `vtk parallelize`
        return _open_path(path / "model.safetensors", existing / "model.safetensors", features=features)
    if (existing / "backbone.safetensors").is_file():  # of `vtk pretrain`
        return _open_path(path / "backbone.safetensors", existing / "backbone.safetensors", features=features)
    if (existing / "adapter_config.json").is_file():
        raise DataError(f"{path} is a PEFT adapter; `vtk tasks from-peft {path} --out PACK` makes a pack of it")
    if files := sorted(file.name for file in existing.glob("*.onnx")):
        raise DataError(f"{path} is a folder of several models; give one of its files, such as {path / files[0]}")
    raise DataError(f"{path} is a folder without task.json, task/task.json or model.onnx; give a pack or a run folder")


def _open_timm(
    name: str,
    pretrained: bool,
    num_classes: int | None,
    img_size: int | tuple[int, int] | None,
    seed: int,
    classes: Sequence[str] | None,
    weights: Path | None,
    features: bool,
) -> Source:
    from vtk.models.inputs import blank_model, input_spec

    try:
        config = getattr(blank_model(name), "pretrained_cfg", None) or {}
    except UsageError as error:
        raise UsageError(f"`{name}` is neither a file nor a folder here, and as a model name: {error}") from error
    if classes is not None:
        if num_classes not in (None, len(classes)) or len(set(classes)) != len(classes):
            raise UsageError(f"`classes` has {len(set(classes))} different names; give one for each class, and no "
                             "num_classes")  # fmt: skip
        num_classes = len(classes)
    count = config.get("num_classes", 1000) if num_classes is None else num_classes
    if features:  # built without a classifier, as timm itself does for features
        count, classes = 0, None
    elif not count or count < 1:
        raise UsageError(f"`{name}` has no classifier of its own; give --num-classes N")
    spec = input_spec(name, None, img_size)
    card = Card(ModelSpec(name), spec, tuple(map(str, classes or range(count))))
    options = {"img_size": img_size, "pretrained": pretrained, "seed": seed, "weights": weights}
    return Source(
        "timm", name, None, card, described=classes is not None, features=features, _options=options
    )  # fmt: skip


def open_with_notes(
    source: "Openable", *, many: bool = False, features: bool = False, **opening: Unpack[Opening]
) -> Source:  # fmt: skip
    """Open a source and print its notes; see `open_source` for the arguments and for what it raises.

    Args:
        source: what to open; a `Source` is returned unchanged.
        many: accept a file of many tasks.
        features: as of `open_source`.
        opening: further arguments of `open_source`.
    """
    opened = open_source(source, many=many, features=features, **opening)
    for note in () if opened is source else opened.notes:
        console.say(note)
    return opened
