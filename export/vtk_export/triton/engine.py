"""Publishes a TensorRT engine that `vtk export tensorrt` or its scripts have built and stamped.

The engine cannot be run here. Its ONNX file can: the stamp records the SHA-256 of both, and the ONNX file is run and
compared with PyTorch.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.errors import DataError, UsageError
from vtk.formats import read_json
from vtk.runtime.data_option import data_images
from vtk.runtime.onnx_file import open_onnx
from vtk.runtime.source import Source
from vtk.runtime.weight_digests import file_digest
from vtk_export.gate.images import card_images
from vtk_export.gate.limits import LIMITS
from vtk_export.gate.rows import check_rows, print_rows
from vtk_export.gate.verify import BATCHES, verify_values
from vtk_export.tensorrt import scripts
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.pbtxt import PLAN, TYPES, Slot


@dataclass(frozen=True)
class Engine:
    """A built engine with its stamp.

    Attributes:
        path: of the engine.
        folder: of it, its stamp, and the ONNX file that it was built from.
        stamp: version of TensorRT, GPU and digests.
        inputs: of the engine, without the batch where it is free.
        outputs: the same.
        batches: fewest, usual and most images of one call.
        batched: whether the batch is free.
        card: of the ONNX file.
        names: of inputs and outputs that differ from this toolkit's, by its own.
    """

    path: Path
    folder: Path
    stamp: dict[str, Any]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    batches: tuple[int, int, int]
    batched: bool
    card: Card
    names: dict[str, str] = field(default_factory=dict)

    @property
    def built(self) -> str:
        """TensorRT version and GPU that it was built with, as text."""
        stamp = {key: str(self.stamp.get(key, "?")) for key in ("tensorrt", "gpu", "compute_capability")}
        return f"TensorRT {stamp['tensorrt']} on {stamp['gpu']} ({stamp['compute_capability']})"


def read_engine(path: Path) -> Engine:
    """Read an engine's stamp and shapes, and check that stamp, engine and ONNX file belong together.

    Args:
        path: the folder of `vtk export tensorrt`, or the engine in it.

    Raises:
        DataError: there is no engine, no stamp, or they are of other files.
    """
    folder = path if path.is_dir() else path.parent
    file = folder / scripts.ENGINE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"`--engine` {file} does not exist; build it there: python {scripts.PYTHON}")
    if not (folder / scripts.STAMP).is_file():
        raise DataError(f"`--engine` {file} has no stamp beside it; run python {scripts.PYTHON} --stamp where it was "
                        "built")  # fmt: skip
    stamp, profile = _object(folder / scripts.STAMP), _object(folder / scripts.PROFILE)
    for name, digest, record in (
        (file.name, stamp.get("engine_sha256"), scripts.STAMP),
        (scripts.MODEL, stamp.get("onnx_sha256"), scripts.STAMP),
        (scripts.MODEL, profile.get("onnx_sha256"), scripts.PROFILE),
    ):
        if digest != file_digest(folder / name):
            raise DataError(f"{folder / name} does not match {record}; build the engine again")
    source = open_onnx(folder / scripts.MODEL)
    inputs, batches, batched = _inputs(profile, folder / scripts.PROFILE, source.facts.name("pixel_values"))
    outputs = tuple(
        Slot(name, _type(entry), _dims(entry.get("shape"), batched), labels=name == source.facts.name("logits"))
        for name, entry in _entries(profile, "outputs")
    )
    return Engine(file, folder, stamp, inputs, outputs, batches, batched, source.card, source.facts.names)


def check_engine(
    engine: Engine, source: Source, config: TritonCommand, data: Path | None = None, *, show: bool
) -> None:
    """Check an engine against the source and the options.

    Raises:
        UsageError: the server may make batches that the engine does not take.
        DataError: the ONNX file has other images or classes than the source.
        VerificationError: it gives other logits.
    """
    fewest, _, most = engine.batches
    if engine.batched and config.max_batch_size > most:
        raise UsageError(f"`--max-batch-size` {config.max_batch_size} is more than the engine takes; give at most "
                         f"{most}, or build it with --max {config.max_batch_size}")  # fmt: skip
    if engine.batched and fewest > 1:
        raise UsageError(f"`--engine` {engine.path} needs {fewest} images or more per call, and a server gets single "
                         "ones; build it with --min 1")  # fmt: skip
    mine, theirs = source.card, engine.card
    if (mine.input, mine.classes) != (theirs.input, theirs.classes):
        what = "images" if mine.input != theirs.input else "classes"
        raise DataError(f"`--engine` {engine.path} was built for other {what} than {source.name} has; export and build "
                        "it again")  # fmt: skip
    batches = tuple(batch for batch in BATCHES if batch <= most) if engine.batched else (most,)
    given = data_images(mine, data, config.split, described=source.described)
    images, what = card_images(mine, sum(batches), given, seed=config.seed)
    precision = open_onnx(engine.folder / scripts.MODEL).facts.precision
    rows, remarks = verify_values(engine.folder / scripts.MODEL, source.model(), images, batches=batches,
                                  threads=config.threads, limits=LIMITS[precision])  # fmt: skip
    if show or not all(row.passed for row in rows):
        print_rows(rows)
        for line in (f"verified with {what}", *remarks):
            console.say(line)
    check_rows(rows)


def copy_engine(engine: Engine, version: Path) -> None:
    """Put the engine, its stamp and its card into a version's folder."""
    version.mkdir()
    shutil.copyfile(engine.path, version / PLAN)
    shutil.copyfile(engine.folder / scripts.STAMP, version / f"{PLAN}.json")
    shutil.copyfile(engine.folder / "model.json", version / "model.json")


def _inputs(profile: dict[str, Any], where: Path, image: str) -> tuple[tuple[Slot, ...], tuple[int, int, int], bool]:
    entries = _entries(profile, "inputs")
    if [name for name, _ in entries] != [image]:
        raise DataError(f"{where} is not of a model with the one input `{image}`; build the engine again")
    ((name, entry),) = entries
    batched = bool(entry.get("dynamic"))
    shapes = [entry.get(which) for which in ("min", "opt", "max")]
    sides = [_dims(shape, True) for shape in shapes]
    if len(set(sides)) != 1:
        raise DataError(f"{where} has shapes of several sizes, {sides}; an engine here takes one")
    fewest, usual, most = (int(shape[0]) for shape in shapes if shape)
    return (Slot(name, _type(entry), _dims(shapes[2], batched)),), (fewest, usual, most), batched


def _entries(profile: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    found = profile.get(key)
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise DataError(f"{scripts.PROFILE} has no `{key}`; build the engine again")
    return list(found.items())


def _type(entry: dict[str, Any]) -> str:
    if (kind := TYPES.get(str(entry.get("dtype")))) is None:
        raise DataError(f"{scripts.PROFILE}: a tensor of type {entry.get('dtype')!r}, which no config can describe")
    return kind


def _dims(shape: Any, batched: bool) -> tuple[int, ...]:
    plain = isinstance(shape, list) and shape and all(isinstance(side, int) for side in shape)
    if not plain or min(shape[1:], default=1) < 1:
        raise DataError(f"{scripts.PROFILE} has a shape {shape!r}, which no config can describe")
    return tuple(shape[1:] if batched else shape)


def _object(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object; build the engine again")
    return found
