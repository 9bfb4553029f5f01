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
    """Bytes of a task's own weights, and whether its attention weights are on the bank's device now."""

    bytes: int
    on_device: bool


@dataclass(frozen=True)
class Memory:
    """Bytes that a bank holds.

    Attributes:
        device: of the bank.
        base_bytes: the shared part, and tables that several tasks share, such as those of one image size.
        tasks: by name; tasks that trained no attention share the base's, which counts with the base.
        device_bytes: all weights on the device, including free slots.
        host_bytes: copies for paging, in pinned host memory.
        graph_bytes: of CUDA graphs on the device, including their inputs; not counted in ``max_gpu_bytes``.
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


def count_bytes(state: State, store: Store, device: str, graph_bytes: int) -> Memory:
    """Count the bytes of a bank, in all and by task. Inside of the store's turn."""
    ends = {name: state.own_bytes(name) for name in state.entries}
    shared = None if state.shared is None else state.shared.number
    own = {n: ends[n] + (store.unit if e.number != shared else 0) for n, e in state.entries.items()}
    tasks = {n: TaskMemory(own[n], e.number in store.residency) for n, e in state.entries.items()}
    fixed = state.fixed_bytes()
    base = fixed - sum(ends.values()) + (store.unit if shared is not None and shared in store.residency else 0)
    return Memory(device, base, tasks, fixed + store.device_bytes(), store.host_bytes(), graph_bytes)
