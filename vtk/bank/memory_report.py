"""Reports the tasks of a bank and the bytes that it holds."""

from collections.abc import Mapping
from dataclasses import dataclass

from vtk.bank.snapshot import State
from vtk.bank.stores import Store


@dataclass(frozen=True)
class TaskInfo:
    """Class names of a task in index order, and the size of its images in pixels."""

    classes: tuple[str, ...]
    height: int
    width: int
    in_chans: int


@dataclass(frozen=True)
class TaskMemory:
    """Bytes of a task's own weights.

    Attributes:
        bytes: of them, without a merged copy.
        on_device: whether its attention weights are on the bank's device now.
        factors: whether these are low-rank changes of the base's.
        merged_bytes: of a merged copy of the changed matrices on the device; 0 for none.
    """

    bytes: int
    on_device: bool
    factors: bool = False
    merged_bytes: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes that a bank holds.

    Attributes:
        device: of the bank.
        base_bytes: the shared part, tables that several tasks share, such as those of one image size, and free slots.
        tasks: by name; tasks that trained no attention share the base's, which counts with the base.
        device_bytes: all weights on the device, including free slots and merged copies.
        host_bytes: copies for paging, in pinned host memory; and what adding packs of factors reads.
        graph_bytes: of CUDA graphs on the device, including their inputs; not counted in ``max_bytes``.
    """

    device: str
    base_bytes: int
    tasks: Mapping[str, TaskMemory]
    device_bytes: int
    host_bytes: int
    graph_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of device, host and graphs."""
        return self.device_bytes + self.host_bytes + self.graph_bytes

    @property
    def factor_bytes(self) -> int:
        """Bytes of all tasks with factors, without merged copies."""
        return sum(task.bytes for task in self.tasks.values() if task.factors)

    @property
    def merged_bytes(self) -> int:
        """Bytes of merged copies."""
        return sum(task.merged_bytes for task in self.tasks.values())


def count_bytes(state: State, store: Store, device: str, graph_bytes: int) -> Memory:
    """Count the bytes of a bank, in all and by task. Inside of the store's turn."""
    shared = None if state.shared is None else state.shared.number
    tasks, ends = {}, 0
    for name, entry in state.entries.items():
        own = state.own_bytes(name)
        ends += own
        tasks[name] = TaskMemory(
            own + (store.bytes_of(entry.number) if entry.number != shared else 0), entry.number in store.residency,
            store.has_factors(entry.number), store.merged_bytes(entry.number),
        )  # fmt: skip
    fixed = state.fixed_bytes()
    base = fixed - ends + store.common_bytes()
    base += store.bytes_of(shared) if shared is not None and shared in store.residency else 0
    host = store.host_bytes() + state.host_bytes()
    return Memory(device, base, tasks, fixed + store.device_bytes(), host, graph_bytes)
