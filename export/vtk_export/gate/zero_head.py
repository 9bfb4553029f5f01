"""Verifies models whose classifier is all zero, as timm initialises those of mixers: their logits are zero, too.

A copy with a random classifier is exported and passes the whole gate. The file that is kept must be the same graph with
the same weights, except for tensors that are zero in it, and must return zeros.
"""

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from vtk import console
from vtk.errors import VerificationError
from vtk_export.gate.verify import open_sessions, run_session

FILLED = "filled"
"""Folder, within that of an export, of the copy with a random classifier."""


def say_zero_head() -> None:
    """Print that a copy is verified instead."""
    console.say("the classifier is all zero, and so are all logits: a copy with a random classifier is verified")


def fill_zero_head(model: nn.Module, seed: int = 0) -> nn.Module | None:
    """Return a copy of a model with random numbers in its classifier; None where that is not all zero.

    Args:
        model: timm's, on the CPU.
        seed: of the numbers.
    """
    heads = _heads(model)
    if not heads or any(bool(tensor.any()) for head in heads for tensor in head.parameters()):
        return None
    filled = copy.deepcopy(model)
    numbers = torch.Generator().manual_seed(seed)
    for head in _heads(filled):
        for tensor in head.parameters():
            tensor.data.copy_(torch.randn(tensor.shape, generator=numbers) * 0.1)
    return filled


def _same_node(node: onnx.NodeProto, other: onnx.NodeProto, weights: Collection[str]) -> bool:
    """Return whether two nodes are equal, except for a bias of zeros that the exporter left out of the first."""
    left_out = other.input[len(node.input) :]
    if left_out and not all(name in weights for name in left_out):
        return False
    bare = onnx.NodeProto()
    bare.CopyFrom(other)
    bare.input[:], bare.name = other.input[: len(node.input)], node.name
    return bool(bare == node)


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the classifiers: one, or two of a distilled model."""
    timms: Any = model
    found = timms.get_classifier() if hasattr(model, "get_classifier") else None
    heads = found if isinstance(found, (tuple, list)) else (found,)
    return [head for head in heads if isinstance(head, nn.Module) and any(True for _ in head.parameters())]


def check_zero_head(path: Path, filled: Path, images: Tensor, names: tuple[str, ...], threads: int | None) -> None:
    """Check a file of zero logits by one of another classifier that passed the gate.

    Args:
        path: the file.
        filled: of the model that `fill_zero_head` gave.
        images: what the file takes.
        names: of its outputs.
        threads: CPU threads.

    Raises:
        VerificationError: it is another graph, has other weights, or gives other logits than zeros.
    """
    mine, other = (onnx.load(each) for each in (path, filled))
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in other.graph.initializer}
    pairs = zip(mine.graph.node, other.graph.node, strict=False)
    alike = len(mine.graph.node) == len(other.graph.node) and all(_same_node(a, b, before) for a, b in pairs)
    ends = [[e.SerializeToString() for e in (*p.graph.input, *p.graph.output)] for p in (mine, other)]
    if not alike or ends[0] != ends[1] or not before.keys() >= {tensor.name for tensor in mine.graph.initializer}:
        raise VerificationError("the graph differs from that of the copy with a random classifier")
    for tensor in mine.graph.initializer:
        value, known = numpy_helper.to_array(tensor), before[tensor.name]
        if value.tobytes() != known.tobytes() and (value.shape != known.shape or value.astype(float).any()):
            raise VerificationError(f"`{tensor.name}` differs from that of the file that passed the gate")
    with open_sessions(path, threads, optimize=(True,)) as (session,):
        for name, found in run_session(session, images, names).items():
            if name == "logits" and bool(found.any()):
                raise VerificationError("the classifier is all zero, but the logits of the file are not")
