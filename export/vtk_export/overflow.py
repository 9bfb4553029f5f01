"""Where an activation is too large for fp16: found in the fp32 graph, on the images of the gate, and named."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path

import onnx
import torch
from torch import Tensor

from vtk.card import Card
from vtk.errors import VerificationError
from vtk_export.place import save
from vtk_export.precision import LARGEST, probe, remedy
from vtk_export.verify import open_sessions


def check_range(
    plain: onnx.ModelProto, makers: Mapping[str, str], card: Card, images: Tensor, *,
    dtype: str, folder: Path, threads: int | None, static_batch: int | None,
) -> None:  # fmt: skip
    """Run the fp32 graph with the largest absolute number of every value that will be fp16 as an output.

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
    graph = copy.deepcopy(plain)
    outputs = probe(graph, makers)
    place = folder / "probe"
    place.mkdir()
    path = save(graph, card, place)
    del graph
    largest = dict.fromkeys(outputs, 0.0)
    with open_sessions(path, threads, optimize=(False,)) as (session,):
        size = static_batch or 4
        for batch in images.split(size):
            if static_batch is not None and len(batch) < static_batch:
                continue
            found = session.run({"pixel_values": batch})
            for name, output in outputs.items():
                # of NaN and a number max() keeps either; torch's keeps NaN
                largest[name] = torch.stack([torch.tensor(largest[name]), found[output]]).max().item()
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    for name, value in largest.items():
        if not value <= LARGEST[dtype]:
            found_value = "NaN" if math.isnan(value) else f"{value:.4g}"
            raise VerificationError(
                f"the output `{name}` of `{makers[name]}` reaches {found_value} in fp32, {dtype} ends at "
                f"{LARGEST[dtype]:.6g}; {remedy(dtype)}"
            )
