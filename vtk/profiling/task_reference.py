"""What a file of many tasks is compared with: each image's logits by its own task's model."""

from collections.abc import Mapping
from pathlib import Path

import torch

from vtk.profiling.compare import torch_reference
from vtk.profiling.inputs import Inputs
from vtk.profiling.session import Answers, Reference
from vtk.runtime.opening import open_source


def mixed_answers(packs: Mapping[str, Path], *, base: Path | None = None) -> Answers:
    """Return what computes logits (n, most classes), fp32, padded with the type's lowest number as the file's are.

    Args:
        packs: name to folder, in the order of the tasks' numbers.
        base: base weights of the packs, if they moved.
    """

    def answers(inputs: Inputs) -> Reference:
        sources = [open_source(path, base=base) for path in packs.values()]
        most = max(len(source.card.classes) for source in sources)
        logits = torch.full((len(inputs.images), most), torch.finfo(torch.float32).min)
        for number, source in enumerate(sources):
            rows = (inputs.more["task"] == number).nonzero()[:, 0]
            if len(rows):
                logits[rows, : len(source.card.classes)] = torch_reference(source.model(), inputs.images[rows])
        return Reference(logits, "torch fp32 on the CPU, each image with its own task's model", "fp32")

    return answers
