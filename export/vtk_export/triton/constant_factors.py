"""Makes the factors of a set of tasks constants of their graph, for servers that can bind no inputs of their own."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from vtk.card import FIRST_SCHEMA, Card
from vtk.errors import VerificationError
from vtk.formats import to_json
from vtk.runtime.backends.base import load_backend
from vtk.runtime.export_facts import Facts
from vtk.runtime.onnx_file import open_onnx
from vtk_export.graph.rename import rename_ends
from vtk_export.output_folder import INLINE_LIMIT

CLOSE = 1e-4
"""Largest difference from the graph with bound factors, relative to a row's largest logit."""

_DTYPES = {"fp32": np.float32, "fp16": np.float16, "int32": np.int32}
_CHECKED = 2
_SEED = 0


def write_constant(folder: Path, layout: Mapping[str, Any], cards: Mapping[str, Card], path: Path,
                   names: Mapping[str, str]) -> None:  # fmt: skip
    """Write one ONNX file with the factors of all tasks inside; a task's number is its place in ``cards``.

    Args:
        folder: of an export of ``--form factors``.
        layout: its ``factors.json``.
        cards: of the tasks.
        path: of the file.
        names: of inputs and outputs that differ from the toolkit's.

    Raises:
        VerificationError: its logits are not those of the graph with bound factors.
    """
    from vtk_export.triton.served.vtk_factors import read_task  # needs onnxruntime

    rows = [read_task(folder / layout["tasks"][name]["file"], layout)[1] for name in cards]
    proto = onnx.load(folder / layout["model"])
    constants = {entry["name"]: _stack(entry, layout["sizes"], rows) for entry in layout["stacks"]}
    inputs = [value for value in proto.graph.input if value.name not in constants]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    width = max(len(card.classes) for card in cards.values())
    next(v for v in proto.graph.output if v.name == "logits").type.tensor_type.shape.dim[1].dim_value = width
    plain = {n: dataclasses.replace(card, base=None, pack={}, schema=FIRST_SCHEMA) for n, card in cards.items()}
    tasks = [{"name": name, "card": card.to_dict()} for name, card in plain.items()]
    rename_ends(proto, names)
    named = Facts(names=dict(names)).props()
    onnx.helper.set_model_props(proto, {**named, "vtk.tasks": to_json({"format": 1, "tasks": tasks})})
    large = proto.ByteSize() > INLINE_LIMIT
    onnx.save_model(proto, path, save_as_external_data=large, location=f"{path.name}.data" if large else None)
    _verify(folder, path, cards)


def _stack(entry: Mapping[str, Any], sizes: Mapping[str, int], rows: list[dict[str, np.ndarray]]) -> np.ndarray:
    shape = [sizes[axis] if isinstance(axis, str) else axis for axis in entry["axes"]]
    values = np.full((len(rows), *shape), entry["fill"], _DTYPES[entry["dtype"]])
    for i, row in enumerate(rows):
        value = row[entry["name"]]
        place: tuple[Any, ...] = (i, *map(slice, value.shape))
        values[place] = value
    return values


def _verify(folder: Path, path: Path, cards: Mapping[str, Card]) -> None:
    """Compare images of all tasks in one call with the graph whose factors are bound, and a number that no task has."""
    from vtk_export.triton.served.vtk_factors import FactorModel

    bound = FactorModel(folder, threads=1)
    generator = np.random.default_rng(_SEED)
    count = _CHECKED * len(cards)
    pixels = generator.standard_normal((count + 1, *bound.shape), dtype=np.float32)
    wanted = bound.run({name: pixels[_CHECKED * i :][:_CHECKED] for i, name in enumerate(cards)})
    numbers = np.append(np.repeat(np.arange(len(cards)), _CHECKED), len(cards)).astype(np.int32)
    session = load_backend("ort-cpu", open_onnx(path, many=True), threads=1)
    try:
        found = session.run({"pixel_values": torch.from_numpy(pixels), "task": torch.from_numpy(numbers)})
    finally:
        session.close()
    logits, classes = found["logits"].numpy(), found["num_classes"].numpy()
    for i, (name, card) in enumerate(cards.items()):
        part = slice(_CHECKED * i, _CHECKED * (i + 1))
        error = np.abs(logits[part, : len(card.classes)] - wanted[name]).max()
        if not error <= CLOSE * np.abs(wanted[name]).max() or (classes[part] != len(card.classes)).any():
            raise VerificationError(f"{path.name}: logits of `{name}` differ by {error:.1e} from those with bound "
                                    "factors; please report this")  # fmt: skip
    if not np.isnan(logits[-1]).all() or classes[-1]:
        raise VerificationError(f"{path.name} answers task number {len(cards)}, which no task has; please report this")
