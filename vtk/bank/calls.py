"""Runs one call of a bank: gets its weights onto the device, and chooses the forward pass."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk.bank.bank_graphs import BucketGraphs
from vtk.bank.fused_calls import FusedCall
from vtk.bank.grouped_weights import Slot
from vtk.bank.snapshot import State
from vtk.bank.stacks import StackStore
from vtk.bank.stores import HeldStore, Store, is_thin
from vtk.models.packed.forward import Layer, Segments, packed_forward


@dataclass(frozen=True)
class Place:
    """Device, dtype and kernels of a bank.

    Attributes:
        device: of the weights.
        dtype: of weights, activations and logits.
        kernels: whether operations of `vtk_kernels` run.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: bool


def run(
    state: State, store: Store, images: Mapping[str, Tensor], place: Place, graphs: BucketGraphs | None
) -> dict[str, Tensor]:
    """Compute the logits of tasks; inside the store's turn, if its calls take turns.

    A call that copies weights to the device runs without a graph: each block then waits for its own weights only, while
    a graph would wait for all of them.

    Args:
        state: of the bank.
        store: of attention weights.
        images: task name to at least one image.
        place: of the bank.
        graphs: of the bank.
    """
    numbers = list(dict.fromkeys(state.entries[name].number for name in images))
    if isinstance(store, HeldStore):
        return _run_held(state, store, images, numbers, place)
    assert isinstance(store, StackStore)
    generation: Hashable = None
    layers: Iterable[Layer]
    ready = all(n in store.residency for n in numbers)
    found, layers = store.layers(numbers, place.kernels and state.is_folded)
    if ready:
        layers, generation = list(layers), (store.generation, state.addresses(images))
    slots = dict(zip(numbers, found, strict=True))
    logits = call(state, images, slots, layers, place, None if generation is None else graphs, generation)
    store.merge_hot(numbers)
    return logits


def call(
    state: State,
    images: Mapping[str, Tensor],
    slots: Mapping[int, Slot],
    layers: Iterable[Layer],
    place: Place,
    graphs: BucketGraphs | None = None,
    generation: Hashable = None,
) -> dict[str, Tensor]:
    """Compute logits, with the folded model if the bank has one.

    Args:
        state: of the bank.
        images: task name to at least one image.
        slots: number of attention weights to its slot in ``layers``.
        layers: attention weights, block by block.
        place: of the bank.
        graphs: captured graphs; None to launch kernel by kernel.
        generation: of the weights; graphs of another one are dropped.
    """
    shared, ends = state.shared, state.ends
    assert shared is not None
    if shared.folded is None or ends is None:
        return _plain(state, images, {number: slot.group for number, slot in slots.items()}, layers, place)
    entries = {name: state.entries[name] for name in images}
    counts = {name: len(batch) for name, batch in images.items()}
    norm = getattr(shared.model, "norm", None)
    fused = FusedCall.of(shared.folded, norm, ends, entries, counts, slots, place.kernels, state.positions)
    return fused.run(images, layers, place.device, place.dtype, graphs, generation)


def _plain(
    state: State, images: Mapping[str, Tensor], slots: Mapping[int, int], layers: Iterable[Layer], place: Place
) -> dict[str, Tensor]:
    """Compute logits with timm's own blocks, embedding and head."""
    assert state.shared is not None
    model = state.shared.model
    entries = sorted((state.entries[name] for name in images), key=lambda e: slots[e.number])
    tokens = [e.embed(images[e.name].to(place.device, place.dtype)) for e in entries]
    parts = [(slots[e.number], *t.shape[:2]) for e, t in zip(entries, tokens, strict=True)]
    x = torch.cat([t.flatten(0, 1) for t in tokens]) if len(tokens) > 1 else tokens[0].flatten(0, 1)
    segments = Segments.of(parts, place.device)
    positions = state.positions.of_rows(
        [(e.name, *t.shape[:2]) for e, t in zip(entries, tokens, strict=True)], x.device
    )
    x = packed_forward(model.blocks, layers, segments, x, positions=positions, kernels=place.kernels)
    x = model.norm(x)
    rows = x.split([count * size for _, count, size in parts])
    return {
        entry.name: entry.logits(of_task.unflatten(0, (count, size)))
        for entry, (_, count, size), of_task in zip(entries, parts, rows, strict=True)
    }


def _run_held(
    state: State, store: HeldStore, images: Mapping[str, Tensor], numbers: Sequence[int], place: Place
) -> dict[str, Tensor]:
    """Compute logits by each task's own tensors; tasks that share the base's matrices stand next to each other."""
    with store.turn():
        store.use(numbers)
        merged = store.merged
    weights = {n: merged.get(n, state.held[n]) for n in numbers}
    numbers = sorted(numbers, key=lambda n: is_thin(weights[n]))
    found = [weights[n] for n in numbers]
    layers: list[Layer] = [{key: [w[i][key] for w in found] for key in part} for i, part in enumerate(found[0])]
    logits = call(state, images, {n: Slot.whole(i) for i, n in enumerate(numbers)}, layers, place)
    store.merge_hot(numbers)
    return logits
