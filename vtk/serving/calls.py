"""One call of a bank: which weights it needs, and the way it runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vtk.models.packed import Layer, Segments, packed_forward
from vtk.serving.ends import Ends
from vtk.serving.entry import Entry
from vtk.serving.folded import Folded
from vtk.serving.fused_calls import FusedCall
from vtk.serving.graphs import BucketGraphs
from vtk.serving.stacks import StackStore
from vtk.serving.state import State
from vtk.serving.stores import HeldStore, Store


def run(
    state: State,
    store: Store,
    images: Mapping[str, Tensor],
    counts: Mapping[str, int],
    device: torch.device,
    dtype: torch.dtype,
    kernels: bool,
    graphs: BucketGraphs | None,
) -> dict[str, Tensor]:
    """Compute the logits of the tasks in ``counts``, which have images, in a store's turn if its calls take turns.

    A call that brings weights in runs without a graph: kernel by kernel, each block waits for its own weights only,
    while a graph would have to wait for all of them.
    """
    assert state.shared is not None
    entries = {name: state.entries[name] for name in counts}
    numbers = list(dict.fromkeys(e.number for e in entries.values()))
    layers: Iterable[Layer]
    generation: tuple[int, int] | None = None
    if isinstance(store, StackStore):
        ready = all(n in store.residency for n in numbers)
        slots, layers = store.layers(numbers)
        if ready:
            layers, generation = list(layers), (store.generation, state.version)
    else:
        slots, layers = list(range(len(numbers))), _held(state, store, numbers)
    place = dict(zip(numbers, slots, strict=True))
    shared = state.shared
    return call(
        shared.model, shared.folded, state.ends, entries, images, counts, place, layers, device, dtype, kernels,
        None if generation is None else graphs, generation,
    )  # fmt: skip


def call(
    model: Any,
    folded: Folded | None,
    ends: Ends | None,
    entries: Mapping[str, Entry],
    images: Mapping[str, Tensor],
    counts: Mapping[str, int],
    place: Mapping[int, int],
    layers: Iterable[Layer],
    device: torch.device,
    dtype: torch.dtype,
    kernels: bool,
    graphs: BucketGraphs | None = None,
    generation: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Compute logits, folded where the bank is; arguments as of `plain_call` and `FusedCall`."""
    if folded is None or ends is None:
        return plain_call(model, entries, images, place, layers, device, dtype, kernels)
    fused = FusedCall.of(folded, getattr(model, "norm", None), ends, entries, counts, place, kernels)
    return fused.run(images, layers, device, dtype, graphs, generation)


def plain_call(
    model: Any,
    entries: Mapping[str, Entry],
    images: Mapping[str, Tensor],
    place: Mapping[int, int],
    layers: Iterable[Layer],
    device: torch.device,
    dtype: torch.dtype,
    kernels: bool,
) -> dict[str, Tensor]:
    """Compute logits with timm's own blocks and ends.

    Args:
        model: what tasks share.
        entries: of the tasks with images.
        images: of each task.
        place: of each number of attention weights in ``layers``.
        layers: attention weights.
        device: of the weights.
        dtype: of the weights.
        kernels: whether operations of `vtk_kernels` run.
    """
    order = sorted(entries, key=lambda n: place[entries[n].number])
    tokens = [entries[n].embed(images[n].to(device, dtype)) for n in order]
    parts = [(place[entries[n].number], *t.shape[:2]) for n, t in zip(order, tokens, strict=True)]
    x = torch.cat([t.flatten(0, 1) for t in tokens]) if len(tokens) > 1 else tokens[0].flatten(0, 1)
    segments = Segments.of(parts, device)
    del tokens
    x = model.norm(packed_forward(model.blocks, layers, segments, x, kernels=kernels))
    rows = x.split([count * size for _, count, size in parts])
    return {
        name: entries[name].logits(of_task.unflatten(0, (count, size)))
        for name, (_, count, size), of_task in zip(order, parts, rows, strict=True)
    }


def _held(state: State, store: Store, numbers: Sequence[int]) -> list[Layer]:
    """Return the weights of these tasks, by layer."""
    assert isinstance(store, HeldStore)
    with store.turn():
        store.use(numbers)
    found = [state.held[n] for n in numbers]
    return [{key: [weights[i][key] for weights in found] for key in part} for i, part in enumerate(found[0])]
