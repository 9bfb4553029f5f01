"""`TaskBank`: one base and many task packs, called with images of several tasks at once."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from vtk.bank.bank_graphs import BucketGraphs
from vtk.bank.base_attention import BaseAttention
from vtk.bank.calls import Place, run
from vtk.bank.held_ends import HeldEnds
from vtk.bank.loader import Incoming, Loader, Made, Unfit
from vtk.bank.memory_report import Memory, TaskInfo, count_bytes
from vtk.bank.positions import Positions
from vtk.bank.shared_weights import Shared
from vtk.bank.snapshot import State, find, new_version
from vtk.bank.stacked_ends import StackedEnds
from vtk.bank.stacks import StackStore
from vtk.bank.stores import HeldStore, Store
from vtk.bank.task_entry import Entry
from vtk.bank.task_heads import Ends
from vtk.errors import UnavailableError, UsageError
from vtk.fused.stages import check_choices
from vtk.fused.tuning_store import load_for
from vtk.models.devices import check_dtype
from vtk.models.weights.base import Base
from vtk.packs.base_files import store_base
from vtk.packs.load import Task


class TaskBank:
    """Serves many tasks that share one base.

    The base is in memory once. A task adds its attention weights, position embedding, prefix tokens and classifier.
    Tasks may be added, removed and reloaded while other threads call: a call sees the tasks as they were when it began.

    Args:
        base: file with the base weights, or a `Base`; None to look up each pack's own; these must then be the same.
        device: ``cpu`` or ``cuda``.
        dtype: of weights, activations and logits; by default fp32 on a CPU and bf16 on CUDA.
        max_bytes: most bytes of weights on the device, base included. All tasks' attention weights are then kept in
            pinned host memory, and those that a call needs replace the least recently used. Room that remains holds
            merged copies of the most used tasks with factors. On a CPU nothing is paged: there it limits merged copies,
            and `memory` tells what would be on a device. None: everything, and no merged copies.
        max_gpu_bytes: older name of ``max_bytes``.
        kernels: run the operations of `vtk_kernels`; by default on CUDA in fp16 and bf16. On a CPU their references
            run, for tests.
        fused: fold norms, softmax scale, LayerScale and parallel branches into the matrices (`vtk.fused`), of the
            shared part once and of each task; by default on a CPU, and on CUDA in fp16 and bf16, if the model can be
            folded.
        graphs: run calls as CUDA graphs, one for each bucket of lengths, captured at the first call that needs it; by
            default if the bank is fused, in fp16 and bf16 on CUDA.

    Raises:
        UsageError: an unsupported ``dtype``, a ``max_bytes`` below 1, graphs where they are not available, or a
            VTK_CHOICES that names no choice table.
        UnavailableError: the device does not exist.
    """

    def __init__(
        self,
        base: str | Path | Base | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        max_bytes: int | None = None,
        max_gpu_bytes: int | None = None,
        kernels: bool | None = None,
        fused: bool | None = None,
        graphs: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"`device` is {device}; a bank runs on cpu or cuda")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UnavailableError(f"`device` is {device} and there is no CUDA device; use cpu")
        cuda = self.device.type == "cuda"
        self.dtype = check_dtype(dtype or (torch.bfloat16 if cuda else torch.float32))
        if max_bytes is not None and max_gpu_bytes is not None:
            raise UsageError("`max_bytes` and `max_gpu_bytes` are one option under two names; give only `max_bytes`")
        self._option = "max_gpu_bytes" if max_gpu_bytes is not None else "max_bytes"
        self.max_bytes = max_bytes if max_gpu_bytes is None else max_gpu_bytes
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"`{self._option}` is {self.max_bytes}; give a number of bytes, or leave it out")
        half = cuda and self.dtype.itemsize == 2
        self.kernels = half if kernels is None else kernels
        if graphs and not (half and self.kernels and fused is not False):
            raise UsageError(
                f"`graphs` needs a fused bank with kernels in fp16 or bf16 on CUDA; this one is {self.dtype} on "
                f"{device}, kernels={self.kernels}, fused={fused}: leave it out, or change these"
            )
        check_choices()
        load_for(self.device)
        self.fused = fused
        self._folds = (half or not cuda) if fused is None else fused
        self._graphs = BucketGraphs() if half and self.kernels and self._folds and graphs is not False else None
        self._unasked = graphs is None and self._graphs is not None
        self._base = store_base(base) if isinstance(base, Base) else None if base is None else Path(base)
        stacked = cuda or self.kernels
        self._store: Store = StackStore(self.device, self._option) if stacked else HeldStore(self._option)
        self._state = State(positions=Positions(stacked=stacked))
        self._loader = Loader(self._base, self.device, self.dtype, self._folds, self._must_fold, not stacked)
        self._changing = threading.Lock()

    @property
    def graphs(self) -> BucketGraphs | None:
        """CUDA graphs of its calls; None if calls launch kernel by kernel."""
        return self._graphs

    @property
    def max_gpu_bytes(self) -> int | None:
        """Older name of ``max_bytes``."""
        return self.max_bytes

    @property
    def tasks(self) -> dict[str, TaskInfo]:
        """Task names in the order they were added, with their classes and image sizes."""
        return {
            name: TaskInfo(e.card.classes, *e.card.input.size, e.card.input.in_chans)
            for name, e in self._state.entries.items()
        }

    def add(self, name: str, pack: str | Path | Task) -> None:
        """Load a pack and serve it.

        Args:
            name: key of the task in calls.
            pack: its folder; or a loaded task, whose model the bank takes over.

        Raises:
            UsageError: the name is taken, a bank does not run the architecture, the pack changed tensors that all tasks
                share (the message names one), or fusing or graphs were requested and a part cannot be folded.
            BaseError: the pack has another base.
            DataError: the pack is damaged or holds NaN.
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"a task's name is {name!r}; give a non-empty string")
        self._refuse_taken(name)
        self._enter(name, pack, lambda: self._refuse_taken(name))

    def remove(self, name: str) -> None:
        """Remove a task and free its memory; running calls finish first.

        Raises:
            UsageError: the bank has no such task.
        """
        with self._changing, self._store.turn():
            state, old = self._state, find(self._state, name)
            entries = {n: e for n, e in state.entries.items() if n != name}
            positions = state.positions.change(entries, self.device, self.dtype)
            ends = None if state.ends is None else state.ends.remove(name)
            later = dataclasses.replace(
                state, entries=entries, ends=ends if entries else None, positions=positions, version=new_version()
            )
            self._publish(later, old)

    def reload(self, name: str) -> None:
        """Read a task's pack again from its folder; a call sees either the old or the new weights.

        Raises:
            UsageError: the bank has no such task. What `add` raises is raised, too; the old weights then stay.
        """
        path = find(self._state, name).path
        self._enter(name, path, lambda: find(self._state, name))  # it may have been removed meanwhile

    def __call__(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the logits of images of several tasks in one pass.

        Args:
            images: task name to (B, channels, height, width), normalised, of the task's size, of any floating type and
                device; B may differ and may be 0.

        Returns:
            Task name to logits (B, classes), in the bank's dtype, on its device; of a fused bank views of one tensor.

        Raises:
            UsageError: an unknown task, images of a wrong shape or type, or more tasks at once than fit the budget.
        """
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            if isinstance(self._store, StackStore):
                with self._store.turn():  # slots are written only between calls
                    return self._run(self._state, images)
            return self._run(self._state, images)

    def memory(self) -> Memory:
        """Return the bytes held, in total and by task."""
        with self._changing, self._store.turn():
            graphs = 0 if self._graphs is None else self._graphs.nbytes
            return count_bytes(self._state, self._store, str(self.device), graphs)

    def _run(self, state: State, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(images, Mapping):
            raise UsageError(f"images are a {type(images).__name__}; give a mapping of task names to images")
        for name, batch in images.items():
            find(state, name).check(batch)
        found: dict[str, Tensor] = {}
        if given := {name: batch for name, batch in images.items() if len(batch)}:
            place = Place(self.device, self.dtype, self.kernels)
            found = run(state, self._store, given, place, self._graphs)
        for name in images.keys() - found.keys():
            found[name] = torch.empty(0, len(state.entries[name].card.classes), dtype=self.dtype, device=self.device)
        return {name: found[name] for name in images}

    def _enter(self, name: str, pack: str | Path | Task, check: Callable[[], object]) -> None:
        """Load a pack and make it a task; ``check`` is called before, when no other thread changes the bank."""
        merge = False
        while True:
            incoming = self._loader.load(pack, self._state, merge=merge)  # meanwhile others may change the bank
            with self._changing:
                check()
                try:
                    return self._commit(name, incoming)
                except Unfit as reason:
                    merge = merge or reason.merge

    def _commit(self, name: str, incoming: Incoming) -> None:
        """Add a task, or refuse it without any change. The caller holds the lock for changes."""
        state = self._state
        others = {n: e for n, e in state.entries.items() if n != name}
        base = self._loader.shared_of(incoming, state, empty=not others)
        kept = base.shared is state.shared
        made = self._loader.make(name, incoming, base)
        entries = {**state.entries, name: made.entry}
        with self._store.turn():
            positions = state.positions if kept else Positions(stacked=state.positions.stacked)
            positions = positions.change(others, self.device, self.dtype, name, made.positions)
            with self._changed_ends(name, state.ends if kept else None, made) as ends:
                later = State(base.shared, entries, {}, ends, positions, base.models, base.attention)
                room = later.room(self.max_bytes, self._store.cost(made.weights), self._option)
            if not kept and name in state.entries:
                self._store.drop(state.entries[name].number)  # the only one, of other shapes
            self._store.set_room(room)
            if base.attention is not None and base.attention is not state.attention:
                self._share_attention(base.shared, base.attention)
            if not any(e.number == made.entry.number for e in state.entries.values()):
                self._store.put(made.entry.number, made.weights)
            self._publish(later, state.entries.get(name))

    @contextlib.contextmanager
    def _changed_ends(self, name: str, ends: Ends | None, made: Made) -> Iterator[Ends | None]:
        """Give the ends with a task's in place of its older ones; where an error follows, take them back."""
        if made.piece is None:
            yield None
            return
        ends = self._new_ends() if ends is None else ends
        old = ends.piece(name)
        try:
            ends = (ends if old is None else ends.remove(name)).add(name, made.piece)
            yield ends
        except BaseException:
            if isinstance(ends, StackedEnds):  # it is changed in place
                ends.remove(name)
                if old is not None:
                    ends.add(name, old)
            raise

    def _new_ends(self) -> Ends:
        return HeldEnds(self.device) if isinstance(self._store, HeldStore) else StackedEnds(self.device)

    def _must_fold(self) -> bool:
        return bool(self.fused) or (self._graphs is not None and not self._unasked)

    def _share_attention(self, shared: Shared, attention: BaseAttention) -> None:
        """Let tasks that trained no attention refer to the base's matrices, too."""
        if attention.whole and self._store.bytes_of(shared.number):
            self._store.drop(shared.number)
            self._store.put(shared.number, attention.task())

    def _publish(self, state: State, old: Entry | None) -> None:
        """Make a state the current one, and free what only the old one used. Inside a turn."""
        store, before = self._store, self._state
        if old is not None and not any(e.number == old.number for e in state.entries.values()):
            store.drop(old.number)
        if self.device.type == "cuda":
            gone = before.positions.tensors()
            if old is not None and old.end is not None:
                gone += old.end.state_dict().values()
            if before.shared is not None and state.shared is not before.shared:
                gone += before.shared.held()
            for tensor in (t for t in gone if t.is_cuda):
                tensor.record_stream(torch.cuda.current_stream())  # it has waited for all calls; the memory's own not
        held = store.held if isinstance(store, HeldStore) else {}
        self._state = dataclasses.replace(state, held=held)
        if state.entries:
            store.set_room(self._state.room(self.max_bytes, 0, self._option))

    def _refuse_taken(self, name: str) -> None:
        if name in self._state.entries:
            raise UsageError(f"there is a task `{name}` in this bank; reload or remove it, or give another name")
