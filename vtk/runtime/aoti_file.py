"""Reads the metadata of a ``.pt2`` of AOTInductor: its card, and the machine that it was compiled for.

Such a file fits one torch release, kind of device and instruction set. Its metadata name these, and are compared with
this machine before its library is loaded, which would crash instead of refusing.
"""

from pathlib import Path

import torch

from vtk.card import Card
from vtk.errors import DataError
from vtk.readers import check_plain, reading
from vtk.runtime import aoti_load
from vtk.runtime.export_facts import Facts
from vtk.runtime.source import Source
from vtk.runtime.weight_digests import check_archive

MAX_BATCH = 4096
"""Largest batch of a new file; each file records its own, except those of version 0.1."""

CARD, DTYPE, TORCH, DEVICE, CPU = "vtk", "vtk.precision", "vtk.torch", "AOTI_DEVICE_KEY", "vtk.cpu"
INPUT, BATCH = "vtk.input", "vtk.max_batch"
"""Keys of a file's metadata. ``vtk.input`` is ``channels,height,width``; version 0.1 has neither it nor the batch."""

SINGLE = "model"
"""Name of the one model, for any batch, of a file of version 0.1."""
_SHARED = (CARD, DTYPE, TORCH, DEVICE, CPU, INPUT, BATCH)


def torch_release() -> str:
    """Return major and minor version: libraries of one release fit together."""
    return ".".join(torch.__version__.split(".")[:2])


def cpu_level() -> str:
    """Return the instruction set that inductor compiles for on this CPU."""
    return torch.backends.cpu.get_cpu_capability()


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a ``.pt2``; nothing is unpickled or loaded.

    Raises:
        DataError: not a file of AOTInductor, or its models are not those of one export.
    """
    check_plain(path, "a .pt2")
    with reading(path, "is not a readable .pt2 file"):
        models = aoti_load.read_metadata(path)
    if not models:
        raise DataError(f"{path} is not a file of AOTInductor; give one made by `vtk export aoti`")
    if models.keys() == {SINGLE}:
        return models[SINGLE]
    if models.keys() != {aoti_load.ONE, aoti_load.MORE}:
        raise DataError(f"{path} holds the models {', '.join(sorted(models))}; give a file made by `vtk export aoti`")
    one, more = models[aoti_load.ONE], models[aoti_load.MORE]
    if odd := [key for key in _SHARED if key not in one or one[key] != more.get(key)]:
        raise DataError(f"{path} is damaged: its two models differ in {odd[0]}; export it again")
    return more


def is_ours(path: Path) -> bool:
    """Return whether a file is a ``.pt2`` that this toolkit wrote."""
    try:
        return CARD in read_metadata(path)
    except DataError:
        return False


def open_aoti(path: Path) -> Source:
    """Read the card of a ``.pt2``.

    Raises:
        DataError: damaged, or not written by this toolkit, so that its input and classes are unknown.
    """
    meta = read_metadata(path)
    if CARD not in meta or meta.get(DTYPE) not in aoti_load.DTYPES:
        raise DataError(f"{path} carries no vtk card; give a file made by `vtk export aoti`")
    check_archive(path)
    name = path.parent.name if path.stem == "model" and path.parent.name else path.name
    return Source("aoti", name, path, Card.from_json(meta[CARD], path), facts=Facts(meta[DTYPE]), trusted=True)


def device_of(source: Source) -> str:
    """Return the kind of device that a ``.pt2`` was made for: ``cpu`` or ``cuda``."""
    return "cpu" if source.path is None else read_metadata(source.path).get(DEVICE, "cpu")
