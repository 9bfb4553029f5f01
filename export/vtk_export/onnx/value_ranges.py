"""Measures the largest activations of an fp32 graph, and names the first node that overflows fp16 or bf16."""

import copy
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx
import torch
from torch import Tensor

from vtk.card import Card
from vtk.errors import VerificationError
from vtk_export.gate.verify import open_sessions
from vtk_export.graph.precision import LARGEST, probe, remedy
from vtk_export.output_folder import save


def check_range(
    plain: onnx.ModelProto, makers: Mapping[str, str], card: Card, images: Tensor, *,
    dtype: str, folder: Path, threads: int | None, static_batch: int | None,
) -> None:  # fmt: skip
    """Check that no value of the fp32 graph overflows the lower precision, on images.

    Args:
        plain: the fp32 graph.
        makers: names of the values that will be in the lower precision, in order, to the nodes that make them.
        card: of the file.
        images: (N, C, H, W), run a few at a time.
        dtype: ``fp16`` or ``bf16``.
        folder: where the graph may be written; nothing stays.
        threads: CPU threads.
        static_batch: batch size of the graph, None for any.

    Raises:
        VerificationError: the first node whose output is beyond the type's range.
    """
    batches = (batch for batch in images.split(static_batch or 4) if static_batch in (None, len(batch)))
    largest = largest_values(plain, makers, card, batches, folder=folder, threads=threads)
    for name, value in largest.items():
        if not value <= LARGEST[dtype]:
            found_value = "NaN" if math.isnan(value) else f"{value:.4g}"
            raise VerificationError(
                f"the output `{name}` of `{makers[name]}` reaches {found_value} in fp32, {dtype} ends at "
                f"{LARGEST[dtype]:.6g}; {remedy(dtype)}"
            )


def largest_values(
    plain: onnx.ModelProto, names: Iterable[str], card: Card, batches: Iterable[Tensor], *,
    folder: Path, threads: int | None,
) -> dict[str, float]:  # fmt: skip
    """Return the largest absolute number of each value of an fp32 graph over batches of images; NaN where one is NaN.

    Args:
        plain: the graph.
        names: of the values.
        card: of the file.
        batches: model inputs (B, C, H, W), of the graph's batch size.
        folder: where the graph may be written; nothing stays.
        threads: CPU threads.
    """
    graph = copy.deepcopy(plain)
    outputs = probe(graph, names)
    place = folder / "probe"
    place.mkdir()
    path = save(graph, card, place)
    del graph
    largest = dict.fromkeys(outputs, 0.0)
    with open_sessions(path, threads, optimize=(False,)) as (session,):
        for batch in batches:
            found = session.run({"pixel_values": batch})
            for name, output in outputs.items():
                # of NaN and a number max() keeps either; torch's keeps NaN
                largest[name] = torch.stack([torch.tensor(largest[name]), found[output]]).max().item()
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    return largest
