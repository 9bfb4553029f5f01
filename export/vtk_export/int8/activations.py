"""Runs an fp32 graph on calibration images and keeps what the ranges of activations are chosen by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from torch import Tensor

from vtk.card import Card
from vtk_export.gate.verify import open_sessions
from vtk_export.output_folder import save

_BUDGET = 256 << 20
"""Bytes of rows that are kept, of all activations together."""
_ROWS = 64
"""Rows of an image, of each activation, at most."""


@dataclass
class Activation:
    """What calibration images gave for one activation.

    Attributes:
        least, most: of each channel (C,), over everything.
        rows: (n, C) of a sample.
    """

    least: np.ndarray
    most: np.ndarray
    parts: list[np.ndarray] = field(default_factory=list)

    @property
    def rows(self) -> np.ndarray:
        """The sample, (n, C)."""
        return np.concatenate(self.parts)


def measure_activations(
    proto: onnx.ModelProto, names: Mapping[str, int], batches: Iterable[Tensor], card: Card, *,
    folder: Path, threads: int | None,
) -> dict[str, Activation]:  # fmt: skip
    """Return what a graph's activations are on images.

    Args:
        proto: the fp32 graph; it is not changed.
        names: of the activations, to their axes of channels.
        batches: model inputs (B, C, H, W), of the graph's batch size.
        card: of the file.
        folder: where the graph may be written; nothing stays.
        threads: CPU threads.

    Returns:
        By name; empty if there were no images.
    """
    graph = onnx.ModelProto()
    graph.CopyFrom(proto)
    present = {value.name for value in graph.graph.output}
    graph.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in present)
    place = folder / "activations"
    place.mkdir()
    path = save(graph, card, place)
    del graph
    found: dict[str, Activation] = {}
    rng, rate, held = np.random.default_rng(0), _ROWS, 0
    try:
        with open_sessions(path, threads, optimize=(False,)) as (session,):
            for batch in batches:
                values = session.run({"pixel_values": batch})
                for name, axis in names.items():
                    value = values[name].float().cpu().numpy()
                    held += _add(found, name, np.moveaxis(value, axis, -1), rate * len(batch), rng)
                while held > _BUDGET and rate > 1:
                    rate //= 2
                    held = sum(_halve(activation) for activation in found.values())
    finally:
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
    return found


def _add(found: dict[str, Activation], name: str, value: np.ndarray, count: int, rng: np.random.Generator) -> int:
    """Add a batch's values, channels last, to an activation; return the bytes of its sample."""
    rows = value.reshape(-1, value.shape[-1])
    least, most = rows.min(0), rows.max(0)
    if name not in found:
        found[name] = Activation(least, most)
    own = found[name]
    own.least, own.most = np.minimum(own.least, least), np.maximum(own.most, most)
    taken = rows[np.sort(rng.choice(len(rows), count, replace=False))] if len(rows) > count else rows.copy()
    own.parts.append(taken)
    return taken.nbytes


def _halve(activation: Activation) -> int:
    activation.parts = [activation.rows[::2].copy()]
    return activation.parts[0].nbytes
