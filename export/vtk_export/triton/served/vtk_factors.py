"""Many tasks of one ONNX model, whose own weights are low-rank factors: stacks that a session has bound.

Needs numpy and onnxruntime. `FactorModel` opens a folder of ``vtk export tasks --form factors``: ``factors.json`` lists
the graph's stacks, (tasks, …) each, and the file of each task, which holds its row of every stack. Calls and changes
take turns: a stack is written, or exchanged for a larger one, between two runs and never while one reads it. Files are
read, not mapped, so that nothing that happens to a file reaches a model that is open.
"""

import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

LAYOUT = "factors.json"
FORMAT = 1
COUNTS = "counts"
"""The stack of each task's number of classes; 0 where there is no task, which makes the graph answer NaN."""

_DTYPES: dict[str, "np.dtype[Any]"] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "int32": np.dtype("<i4")}
_STORED: dict[str, "np.dtype[Any]"] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_LARGEST_HEADER = 16 << 20
_LARGEST_AXIS = 1 << 24
_SHOWN = 20


class FactorError(ValueError):
    """A file, a name or images cannot be used; the text is one line that says why."""


@dataclass(frozen=True)
class Task:
    """A task that a model holds.

    Attributes:
        classes: names in index order.
        shape: (channels, height, width) of its images.
        slot: its number in the stacks: what the graph's input ``task`` is.
        bytes: of its rows, without padding.
    """

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    slot: int
    bytes: int


class _Stack:
    """The rows of all tasks for one input of the graph: (slots, …), padded to the largest task of each open axis."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.name: str = entry["name"]
        self.axes: tuple[int | str, ...] = tuple(entry["axes"])
        self.dtype, self.fill = _DTYPES[entry["dtype"]], entry["fill"]
        self.values = np.empty((0, *[1] * len(self.axes)), self.dtype)

    def grown(self, slots: int, sizes: Mapping[str, int]) -> np.ndarray:
        """Return the values with room for so many tasks of these sizes, in new memory if there is none yet."""
        shape = (slots, *(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes))
        if shape == self.values.shape:
            return self.values
        # zeros are pages that nobody has touched
        values = np.zeros(shape, self.dtype) if self.fill == 0 else np.full(shape, self.fill, self.dtype)
        values[tuple(map(slice, self.values.shape))] = self.values
        return values

    def write(self, slot: int, row: np.ndarray | None) -> None:
        """Put a task's row into its slot; None leaves padding alone in it."""
        self.values[slot] = self.fill
        if row is not None:
            place: tuple[Any, ...] = (slot, *map(slice, row.shape))
            self.values[place] = row


class FactorModel:
    """Runs images of many tasks; tasks may be added, replaced and removed by any thread at any time.

    Args:
        folder: of an export.
        threads: CPU threads of a run; by default ONNX Runtime's.
        tasks: names of the tasks to begin with; by default all that ``factors.json`` lists.
        providers: of ONNX Runtime.
        device: where the stacks are, "cpu" or "cuda".
        optimize: whether ONNX Runtime optimises the graph.

    Attributes:
        shape: (channels, height, width) of the images of all tasks.

    Raises:
        FactorError: the folder is no export of this format, or a file of it is damaged or absent.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        threads: int | None = None,
        tasks: Sequence[str] | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        device: str = "cpu",
        optimize: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.layout = read_layout(self.folder / LAYOUT)
        spec = self.layout["input"]
        self.shape: tuple[int, int, int] = (spec["in_chans"], spec["height"], spec["width"])
        for name, wanted in self.layout["sha256"].items():
            if _sha256(self.folder / name) != wanted:
                raise FactorError(f"{self.folder / name} is damaged: it is not the file that was exported")
        self._stacks = {entry["name"]: _Stack(entry) for entry in self.layout["stacks"]}
        self._sizes = {axis: 1 for stack in self._stacks.values() for axis in stack.axes if isinstance(axis, str)}
        self._device, self._batch = device, self.layout["batch"]
        self._tasks: dict[str, Task] = {}
        self._free: list[int] = []
        self._turn = threading.Lock()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        path = str(self.folder / self.layout["model"])
        self._session = ort.InferenceSession(path, options, providers=list(providers))
        self._binding = self._session.io_binding()
        listed = self.layout["tasks"]
        wanted_tasks = list(listed) if tasks is None else list(tasks)
        self._grow(max(1, len(wanted_tasks)), self._sizes)
        for name in wanted_tasks:
            if name not in listed:
                raise FactorError(f"{self.folder} has no task {name!r}; it has {_some(list(listed))}")
            self.add(name, self.folder / listed[name]["file"])

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks by name, as they are now."""
        with self._turn:
            return dict(self._tasks)

    def add(self, name: str, file: str | Path) -> None:
        """Add a task: read its file, and write its rows into a free slot.

        Raises:
            FactorError: the name is taken, or the file is damaged or of another export.
        """
        self._put(name, file, new=True)

    def replace(self, name: str, file: str | Path) -> None:
        """Exchange the weights and classes of a task for those of another file, between two runs.

        Raises:
            FactorError: there is no such task, or the file is damaged or of another export; the task stays as it was.
        """
        self._put(name, file, new=False)

    def remove(self, name: str) -> None:
        """Remove a task; its slot is free for another.

        Raises:
            FactorError: there is no such task.
        """
        with self._turn:
            slot = self._known(name).slot
            for stack in self._stacks.values():
                stack.write(slot, None)
                self._bind(stack)
            del self._tasks[name]
            self._free = sorted([*self._free, slot])

    def run(self, batches: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run images of any tasks in one call of the graph.

        Args:
            batches: name to normalised images (n, channels, height, width), of any floating type, which are made fp32;
                n may be 0.

        Returns:
            Name to logits (n, classes of the task), fp32.

        Raises:
            FactorError: no mapping, an unknown task, or images of another size or type; nothing is run.
        """
        if not isinstance(batches, Mapping):
            raise FactorError(f"`run` takes a mapping, name to images of that task; given a {type(batches).__name__}")
        images = {name: np.asarray(pixels) for name, pixels in batches.items()}
        for name, pixels in images.items():
            if pixels.ndim != 4 or pixels.shape[1:] != self.shape:
                wanted = f"(n, {', '.join(map(str, self.shape))})"
                raise FactorError(f"images of task {name!r} are {pixels.shape}; they have to be {wanted}")
            if not np.issubdtype(pixels.dtype, np.floating):  # bytes of an image are not normalised
                raise FactorError(f"images of task {name!r} are {pixels.dtype}; they have to be of a floating type")
        pixels = np.concatenate([np.empty((0, *self.shape), np.float32), *images.values()], dtype=np.float32)
        with self._turn:
            tasks = {name: self._known(name) for name in images}
            numbers = [np.full(len(images[name]), task.slot, np.int32) for name, task in tasks.items()]
            logits, _ = self._run(pixels, np.concatenate([np.empty(0, np.int32), *numbers]))
        found, start = {}, 0
        for name, task in tasks.items():
            end = start + len(images[name])
            found[name] = logits[start:end, : len(task.classes)]
            start = end
        return found

    def run_slots(self, pixels: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Run images with numbers of slots, as the graph takes them.

        Args:
            pixels: (n, channels, height, width) fp32.
            slots: (n,) int32.

        Returns:
            Logits (n, classes of the largest task), the lowest fp32 number behind a task's own; and each image's number
            of classes (n,) int32. A number that no task has gives NaN and 0.
        """
        with self._turn:
            return self._run(pixels, slots)

    def memory(self) -> dict[str, int]:
        """Return the bytes of the stacks, of the tasks' rows in them, and of padding to the largest task's sizes.

        The rest of the stacks are free slots, which take memory once a task was in them.
        """
        with self._turn:
            slots = max(1, len(self._stacks[COUNTS].values))
            whole = sum(stack.values.nbytes for stack in self._stacks.values())
            used = sum(task.bytes for task in self._tasks.values())
            return {"stacks": whole, "tasks": used, "padding": whole // slots * len(self._tasks) - used}

    def _put(self, name: str, file: str | Path, *, new: bool) -> None:
        classes, rows = read_task(Path(file), self.layout)
        sizes = dict(self._sizes)
        for stack in self._stacks.values():
            for axis, size in zip(stack.axes, rows[stack.name].shape, strict=True):
                if isinstance(axis, str):
                    sizes[axis] = max(sizes[axis], size)
        with self._turn:
            if new and name in self._tasks:
                raise FactorError(f"there is a task {name!r} already; replace it, or give another name")
            sizes = {axis: max(size, self._sizes[axis]) for axis, size in sizes.items()}
            slots = len(self._stacks[COUNTS].values)
            if new and len(self._tasks) == slots:
                slots *= 2  # each growth copies all stacks; rows that nobody has written take no memory
            self._grow(slots, sizes)
            slot = self._free.pop(0) if new else self._known(name).slot
            for stack in self._stacks.values():
                stack.write(slot, rows[stack.name])
                self._bind(stack)
            nbytes = sum(row.nbytes for row in rows.values())
            self._tasks[name] = Task(classes, self.shape, slot, nbytes)

    def _grow(self, slots: int, sizes: Mapping[str, int]) -> None:
        before = len(self._stacks[COUNTS].values)
        grown = {name: stack.grown(slots, sizes) for name, stack in self._stacks.items()}  # all, or no memory for them
        for name, stack in self._stacks.items():
            if grown[name] is not stack.values:
                stack.values = grown[name]
                self._bind(stack, moved=True)
        self._free += range(before, slots)
        self._sizes = dict(sizes)

    def _bind(self, stack: _Stack, *, moved: bool = False) -> None:
        """Let runs read a stack where it is now; on a CPU a value is the array itself, elsewhere a copy of it."""
        if moved or self._device != "cpu":
            value = ort.OrtValue.ortvalue_from_numpy(stack.values, self._device)
            self._binding.bind_ortvalue_input(stack.name, value)

    def _run(self, pixels: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Do `run_slots`, in calls of the graph's batch size where that is fixed."""
        step = self._batch or max(1, len(pixels))
        logits, counts = [], []
        for start in range(0, max(1, len(pixels)), step):
            part, numbers = pixels[start : start + step], slots[start : start + step]
            count = len(part)
            if self._batch and count < step:  # a number that no task has, changes no other row
                part = np.concatenate([part, np.zeros((step - count, *self.shape), np.float32)])
                numbers = np.concatenate([numbers, np.full(step - count, -1, np.int32)])
            self._binding.bind_cpu_input(self._name("pixel_values"), np.ascontiguousarray(part))
            self._binding.bind_cpu_input(self._name("task"), np.ascontiguousarray(numbers))
            self._binding.bind_output(self._name("logits"))
            self._binding.bind_output(self._name("num_classes"))
            self._session.run_with_iobinding(self._binding)
            found = self._binding.copy_outputs_to_cpu()
            logits.append(found[0][:count])
            counts.append(found[1][:count])
        return np.concatenate(logits), np.concatenate(counts)

    def _name(self, term: str) -> str:
        """Return what the graph calls an input or output."""
        return str(self.layout.get("names", {}).get(term, term))

    def _known(self, name: str) -> Task:
        task = self._tasks.get(name)
        if task is None:
            raise FactorError(f"unknown task {name!r}; this model has {_some(list(self._tasks))}")
        return task


def read_task(path: Path, layout: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Read the file of a task, a .safetensors, and check it against the layout and its own digest.

    Returns:
        Classes, and the rows of all stacks by their names.

    Raises:
        FactorError: it is damaged, half copied or of another export.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FactorError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        length = int.from_bytes(data[:8], "little")
        if not 2 <= length <= min(_LARGEST_HEADER, len(data) - 8):
            raise ValueError("its header does not end")
        header = json.loads(data[8 : 8 + length])
        about = json.loads(header.pop("__metadata__")["vtk.factors"])
        body = memoryview(data)[8 + length :]
        if about["layout"] != layout["layout"]:
            raise ValueError("it is of another export; export its pack into this folder")
        if about["sha256"] != hashlib.sha256(body).hexdigest():
            raise ValueError("its bytes are not those that were written")
        classes = tuple(map(str, about["classes"]))
        rows = {entry["name"]: _row(entry, header, body, len(classes)) for entry in layout["stacks"]}
        _check_open(layout["stacks"], rows)
        return classes, rows
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        text = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise FactorError(f"{path} is no file of a task of this model: {text or type(error).__name__}") from error


def _row(entry: Mapping[str, Any], header: Mapping[str, Any], body: memoryview, classes: int) -> np.ndarray:
    name = entry["name"]
    if name == COUNTS:
        return np.array(classes, _DTYPES[entry["dtype"]])
    found = header[name]
    dtype, shape, (start, end) = _STORED[found["dtype"]], tuple(found["shape"]), found["data_offsets"]
    if dtype != _DTYPES[entry["dtype"]] or len(shape) != len(entry["axes"]):
        raise ValueError(f"`{name}` is {found['dtype']} {shape}")
    for size, axis in zip(shape, entry["axes"], strict=True):
        wanted = classes if axis == "classes" else axis
        if size < 0 or (isinstance(wanted, int) and size != wanted):
            raise ValueError(f"`{name}` is {shape}, expected {tuple(entry['axes'])}")
    if not 0 <= start <= end <= len(body) or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"`{name}` does not lie in it")
    row = np.frombuffer(body[start:end], dtype).reshape(shape)
    if not np.isfinite(row).all():
        raise ValueError(f"`{name}` holds numbers that are not finite")
    return row


def _check_open(stacks: Sequence[Mapping[str, Any]], rows: Mapping[str, np.ndarray]) -> None:
    """Refuse two factors of one matrix with different ranks."""
    sizes: dict[str, int] = {}
    for entry in stacks:
        shape = rows[entry["name"]].shape
        for axis, size in zip(entry["axes"], shape, strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise ValueError(f"`{entry['name']}` is {shape}, the other factor of its matrix has {sizes[axis]}")


def read_layout(path: Path) -> dict[str, Any]:
    """Read ``factors.json``, and check what of it is used.

    Raises:
        FactorError: it is damaged, of another format or no such file.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}, this code reads {FORMAT}")
        sizes = [found["input"][key] for key in ("in_chans", "height", "width")]
        sizes += [1 if found["batch"] is None else found["batch"]]
        names = [found["model"], *found["sha256"], *(task["file"] for task in found["tasks"].values())]
        for stack in found["stacks"]:
            names.append(stack["name"])
            sizes += [axis for axis in stack["axes"] if not isinstance(axis, str)]
            if stack["dtype"] not in _DTYPES or not isinstance(stack["fill"], (int, float)):
                raise ValueError(f"`{stack['name']}` is of no known type")
        if not isinstance(found.get("names", {}), dict):
            raise ValueError("its `names` are no object")
        if not isinstance(found["layout"], str) or COUNTS not in [stack["name"] for stack in found["stacks"]]:
            raise ValueError("it lists no stacks")
        if not all(type(size) is int and 0 < size <= _LARGEST_AXIS for size in sizes):
            raise ValueError("it has a size that is none")
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError("it names a file that does not lie beside it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise FactorError(f"{path} is no layout of `vtk export tasks --form factors`: {text}") from error
    return found


def _sha256(path: Path) -> str:
    try:
        hasher = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                hasher.update(chunk)
        return hasher.hexdigest()
    except OSError as error:
        raise FactorError(f"{path} cannot be read: {error.strerror or error}") from error


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(map(repr, names[:_SHOWN])) + more) if names else "none"
