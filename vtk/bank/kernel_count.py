"""Counts the kernels that one call of a bank launches on CUDA, without a GPU."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vtk.bank.bank import TaskBank
from vtk.bank.calls import Place, call
from vtk.bank.fused_calls import FusedCall
from vtk.bank.grouped_weights import GroupedMatrix, SmallStack
from vtk.bank.held_ends import HeldEnds
from vtk.bank.layout import Bucket
from vtk.bank.snapshot import find
from vtk.bank.stacks import StackStore
from vtk.bank.task_heads import CallEnds, Heads
from vtk.errors import UsageError
from vtk.fused.kernel_count import Counting
from vtk.models.packed.products import stacked


def launches(bank: TaskBank, images: Mapping[str, int]) -> Counter[str]:
    """Return the operations of one call on CUDA without a graph, with their kernels, as `vtk.fused.launches` counts.

    Args:
        bank: on the CPU, in fp16 or bf16, with ``kernels=True`` and no budget; it is not changed.
        images: of each task, at least one.

    Raises:
        UsageError: the bank has no kernels, or not these tasks.
    """
    state, store = bank._state, bank._store
    if not isinstance(store, StackStore) or not bank.kernels or bank.dtype.itemsize > 2:
        raise UsageError("kernels are counted for a bank in fp16 or bf16 created with kernels=True; create it so")
    entries = {name: find(state, name) for name in images}
    assert state.shared is not None
    numbers = list(dict.fromkeys(e.number for e in entries.values()))
    slots, stacks = store.layers(numbers, state.is_folded)
    slot_of = dict(zip(numbers, slots, strict=True))
    cuda = torch.device("cuda")
    if state.shared.folded is not None and state.ends is not None:
        fused = FusedCall.of(state.shared.folded, None, state.ends, entries, images, slot_of, True, state.positions)
        fused.layout(Bucket.exact(fused.parts), cuda)  # remembered: there are no fakes among its integers
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layers: list[Any] = [{key: _fake_stack(t) for key, t in part.items()} for part in stacks]
        folded = None if state.shared.folded is None else _fake_module(state.shared.folded)
        shared = dataclasses.replace(state.shared, model=_fake_module(state.shared.model), folded=folded)
        ends = None if state.ends is None else _FakeEnds(cuda, call=_fake_ends(state.ends.of_call(list(entries))))
        rope, biases = state.positions.rope, {key: _fake(t) for key, t in state.positions.biases.items()}
        positions = dataclasses.replace(state.positions, biases=biases)
        vars(positions)["rope"] = None if rope is None else _fake(rope)
        for name, entry in entries.items():
            entries[name] = copy.copy(entry)
            object.__setattr__(entries[name], "end", None if entry.end is None else _fake_module(entry.end))
        batches = {
            n: torch.empty(count, entries[n].card.input.in_chans, *entries[n].card.input.size, dtype=bank.dtype,
                           device="cuda")
            for n, count in images.items()
        }  # fmt: skip
        with Counting() as counting:
            fake = dataclasses.replace(state, shared=shared, entries=entries, ends=ends, positions=positions)
            call(fake, batches, slot_of, layers, Place(cuda, bank.dtype, kernels=True))
    return counting.counts


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


def _fake_stack(value: Any) -> Any:
    return value.map(_fake) if isinstance(value, GroupedMatrix | SmallStack) else _fake(stacked(value))


def _fake_module(module: nn.Module) -> Any:
    """Return a copy of a module whose tensors are fakes on CUDA."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): _fake(t) for t in tensors})


@dataclass(frozen=True)
class _FakeEnds(HeldEnds):
    """What one call reads, as fakes."""

    call: CallEnds | None = None

    def of_call(self, names: Sequence[str]) -> CallEnds:
        """Return it."""
        assert self.call is not None
        return self.call


def _fake_ends(ends: CallEnds) -> CallEnds:
    heads = tuple(Heads(_fake(stacked(h.w)), _fake(stacked(h.b))) for h in ends.heads)
    low = ends.low_rank
    if low is not None and low.factors is not None:
        low = dataclasses.replace(low, factors=low.factors.map(_fake))
    table = None if ends.table is None else _fake(ends.table)
    return dataclasses.replace(ends, table=table, heads=heads, low_rank=low)
