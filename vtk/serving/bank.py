"""`TaskBank`: one base and any number of task packs, called with images of several tasks at once."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk.errors import UnavailableError, UsageError
from vtk.models.base import Base
from vtk.models.packed import Layer, Segments, packed_forward
from vtk.serving.entry import Entry, Weights, make_entry, n_bytes, weights_bytes
from vtk.serving.memory import Memory, TaskInfo, TaskMemory
from vtk.serving.shared import Shared, build, check_structure
from vtk.serving.stores import HeldStore, StackStore, Store
from vtk.tasks.base import store_base
from vtk.tasks.load import Task, load_task

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _State:
    """What a call sees: replaced as a whole, never changed."""

    shared: Shared | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    held: Mapping[int, Weights] = field(default_factory=dict)

    def fixed_bytes(self) -> int:
        """Return the bytes that are always on the device: what is shared, and the tasks' ends."""
        shared = list(self.shared.tensors().values()) if self.shared else []
        return n_bytes(shared) + sum(e.end_bytes for e in self.entries.values())


class TaskBank:
    """Serves many tasks of one base.

    The base is in memory once. A task adds its attention weights, position table, prefix tokens and classifier. Tasks
    may be added, removed and reloaded while other threads call: a call sees the tasks as they were when it began.

    Args:
        base: file with the base weights, or a `Base`; None to look up each pack's own, which must then agree.
        device: where it runs.
        dtype: of weights, activations and logits; by default fp32 on a CPU and bf16 on CUDA.
        max_gpu_bytes: most bytes of weights on the device. All tasks' attention weights are then kept in pinned host
            memory, and those that a call needs take the places of the least recently used. On a CPU only the account
            of it is kept.
        kernels: run the operations of `vtk_kernels`; by default on CUDA in fp16 and bf16. On a CPU their references
            run, which is for tests.

    Raises:
        UsageError: a type without arithmetic, or a budget below 1.
        UnavailableError: there is no such device.
    """

    def __init__(
        self,
        base: str | Path | Base | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        max_gpu_bytes: int | None = None,
        kernels: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"`device` is {device}; a bank runs on cpu or cuda")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UnavailableError(f"`device` is {device} and there is no CUDA device; use cpu")
        cuda = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if cuda else torch.float32)
        if self.dtype not in DTYPES:
            raise UsageError(f"`dtype` is {dtype}; give {', '.join(map(str, DTYPES))}")
        if max_gpu_bytes is not None and max_gpu_bytes < 1:
            raise UsageError(f"`max_gpu_bytes` is {max_gpu_bytes}; give a number of bytes, or leave it out")
        self.max_gpu_bytes = max_gpu_bytes
        self.kernels = (cuda and self.dtype.itemsize == 2) if kernels is None else kernels
        self._base = store_base(base) if isinstance(base, Base) else None if base is None else Path(base)
        self._store: Store = StackStore(self.device) if cuda or self.kernels else HeldStore()
        self._state = _State()
        self._changing = threading.Lock()

    @property
    def tasks(self) -> dict[str, TaskInfo]:
        """Names of the tasks, in the order they came, with their classes and image sizes."""
        return {
            name: TaskInfo(e.card.classes, *e.card.input.size, e.card.input.in_chans)
            for name, e in self._state.entries.items()
        }

    def add(self, name: str, pack: str | Path | Task) -> None:
        """Load a pack and serve it.

        Args:
            name: under which it is called.
            pack: its folder; or a task already loaded, whose model is used up.

        Raises:
            UsageError: the name is taken, the architecture is not one a bank runs, or the pack changed tensors that all
                tasks share, by name.
            BaseError: it is of another base.
            DataError: the pack is damaged or holds NaN.
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"a task's name is {name!r}; give a text")
        self._refuse_taken(name)
        task = self._load(pack)  # takes seconds: others may call and change the bank meanwhile
        with self._changing:
            self._refuse_taken(name)
            self._commit(name, task)

    def remove(self, name: str) -> None:
        """Stop serving a task and free its memory; calls in flight finish.

        Raises:
            UsageError: there is no such task.
        """
        with self._changing, self._store.turn():
            old = self._find(self._state, name)
            self._publish(self._state.shared, {n: e for n, e in self._state.entries.items() if n != name}, old)

    def reload(self, name: str) -> None:
        """Read a task's pack again from its folder, as after another training run; calls see the old one or the new.

        Raises:
            UsageError: there is no such task; and all that `add` raises, the old weights staying in place.
        """
        task = self._load(self._find(self._state, name).path)
        with self._changing:
            self._find(self._state, name)  # it may have been removed meanwhile
            self._commit(name, task)

    def __call__(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the logits of images of several tasks in one pass.

        Args:
            images: (B, chans, height, width) for each task, of its own size, normalised, any floating type and device;
                B may differ and may be 0.

        Returns:
            (B, classes) for each task, in the bank's type, on its device.

        Raises:
            UsageError: an unknown task, images it does not take, or more tasks at once than the budget has room for.
        """
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            if isinstance(self._store, StackStore):
                with self._store.turn():  # slots are written only between calls
                    return self._run(self._state, images, self._store)
            return self._run(self._state, images, None)

    def memory(self) -> Memory:
        """Return the bytes held, in all and by task."""
        with self._changing, self._store.turn():
            state, store = self._state, self._store
            ends = sum(e.end_bytes for e in state.entries.values())
            shared = None if state.shared is None else state.shared.number
            own = {n: e.end_bytes + (store.unit if e.number != shared else 0) for n, e in state.entries.items()}
            tasks = {n: TaskMemory(own[n], e.number in store.residency) for n, e in state.entries.items()}
            fixed = state.fixed_bytes()
            base = fixed - ends + (store.unit if shared is not None and shared in store.residency else 0)
            return Memory(str(self.device), base, tasks, fixed + store.device_bytes(), store.host_bytes())

    def _run(self, state: _State, images: Mapping[str, Tensor], stacks: StackStore | None) -> dict[str, Tensor]:
        if not isinstance(images, Mapping):
            raise UsageError(f"images are a {type(images).__name__}; give a mapping of task names to images")
        for name, batch in images.items():
            self._find(state, name).check(batch)
        entries = {name: state.entries[name] for name, batch in images.items() if len(batch)}
        logits = {n: torch.empty(0, len(state.entries[n].card.classes), dtype=self.dtype, device=self.device)
                  for n in images}  # fmt: skip
        if not entries or state.shared is None:
            return logits
        numbers = list(dict.fromkeys(e.number for e in entries.values()))
        layers: Any
        if stacks is not None:
            slots, layers = stacks.layers(numbers)
        else:
            slots, layers = list(range(len(numbers))), self._layers(state, numbers)
        place = dict(zip(numbers, slots, strict=True))
        order = sorted(entries, key=lambda n: place[entries[n].number])
        tokens = [entries[n].embed(images[n].to(self.device, self.dtype)) for n in order]
        parts = [(place[entries[n].number], *t.shape[:2]) for n, t in zip(order, tokens, strict=True)]
        x = torch.cat([t.flatten(0, 1) for t in tokens]) if len(tokens) > 1 else tokens[0].flatten(0, 1)
        segments = Segments.of(parts, self.device)
        del tokens
        x = packed_forward(state.shared.model.blocks, layers, segments, x, kernels=self.kernels)
        x = state.shared.model.norm(x)
        for name, (_, count, size), rows in zip(order, parts, x.split([c * n for _, c, n in parts]), strict=True):
            logits[name] = entries[name].logits(rows.unflatten(0, (count, size)))
        return logits

    def _layers(self, state: _State, numbers: list[int]) -> list[Layer]:
        """Return the weights of these tasks, by layer."""
        assert isinstance(self._store, HeldStore)
        with self._store.turn():
            self._store.use(numbers)
        found = [state.held[n] for n in numbers]
        return [{key: [weights[i][key] for weights in found] for key in part} for i, part in enumerate(found[0])]

    def _load(self, pack: str | Path | Task) -> Task:
        task = pack if isinstance(pack, Task) else load_task(pack, base=self._base)
        check_structure(task)
        return task

    def _commit(self, name: str, task: Task) -> None:
        """Put a task in place, or refuse it and leave all as it was. The caller has the lock for changes."""
        state = self._state
        others = {n: e for n, e in state.entries.items() if n != name}
        shared = state.shared
        if shared is not None and others:
            shared.check(task)
        elif shared is None or not shared.fits(task):
            shared = build(task, self.device, self.dtype)
        entry, weights = make_entry(name, task, shared, self.device, self.dtype)
        entries = {**state.entries, name: entry}
        with self._store.turn():
            limit = self._room(_State(shared, entries), weights_bytes(weights))
            if shared is not state.shared and name in state.entries:
                self._store.drop(state.entries[name].number)  # the only one, of other shapes
            self._store.set_limit(limit)
            if not any(e.number == entry.number for e in state.entries.values()):
                self._store.put(entry.number, weights)
            self._publish(shared, entries, state.entries.get(name))

    def _publish(self, shared: Shared | None, entries: Mapping[str, Entry], old: Entry | None) -> None:
        """Make a new state the one that calls see, and let go of what only ``old`` used."""
        store = self._store
        if old is not None and not any(e.number == old.number for e in entries.values()):
            store.drop(old.number)
        gone = [] if old is None else [old.end]
        if self._state.shared is not None and shared is not self._state.shared:
            gone.append(self._state.shared.model)
        for tensor in (t for model in gone for t in model.state_dict().values() if t.is_cuda):
            tensor.record_stream(torch.cuda.current_stream())  # it has waited for all calls; the memory's own has not
        self._state = _State(shared, entries, store.held if isinstance(store, HeldStore) else {})
        if entries:
            store.set_limit(self._room(self._state, store.unit))

    def _room(self, state: _State, unit: int) -> int | None:
        """Return how many tasks' attention weights fit on the device.

        Raises:
            UsageError: not even one's.
        """
        if self.max_gpu_bytes is None:
            return None
        fixed = state.fixed_bytes()
        if fixed + unit > self.max_gpu_bytes:
            raise UsageError(
                f"`max_gpu_bytes` is {self.max_gpu_bytes}: the shared weights and the tasks' tables and heads take "
                f"{fixed}, the attention weights of one task {unit}; raise it, or hold fewer tasks"
            )
        return (self.max_gpu_bytes - fixed) // unit

    def _find(self, state: _State, name: str) -> Entry:
        if name not in state.entries:
            names = list(state.entries)
            held = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"
            raise UsageError(f"there is no task {name!r} in this bank; it holds {held}: give one of these, or add it")
        return state.entries[name]

    def _refuse_taken(self, name: str) -> None:
        if name in self._state.entries:
            raise UsageError(f"there is a task `{name}` in this bank; reload or remove it, or give another name")
