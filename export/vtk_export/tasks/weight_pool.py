"""Deduplicates the weights of several ONNX graphs, and writes those of more than one graph into a shared data file.

ONNX Runtime maps external data into memory instead of reading it, and pages of one file are in memory once however many
sessions and processes map them. For that an offset has to be a multiple of the page size, on Windows of 64 KiB.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

PAGE, GRANULE = 4096, 65536
LEAST = 256
"""Bytes below which a tensor stays in its graph: a vector too short to be worth a mapping."""


class Pool:
    """Moves the weights out of graphs, and returns each graph with references into files or its own weights.

    Attributes:
        users: for each distinct tensor, by the sha256 of its bytes, the graphs that have it.
    """

    def __init__(self) -> None:
        self.users: dict[str, set[str]] = {}
        self._bytes: dict[str, bytes] = {}
        self._ranks: dict[str, int] = {}
        self._graphs: dict[str, tuple[onnx.ModelProto, dict[str, str]]] = {}

    def add(self, name: str, proto: onnx.ModelProto) -> None:
        """Add a graph under a name, and move its weights into the pool."""
        keys: dict[str, str] = {}
        for tensor in proto.graph.initializer:
            # constants of shapes stay where the runtime's shape inference looks for them
            if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.raw_data) < LEAST:
                continue
            key = digest(tensor.raw_data)
            keys[tensor.name] = key
            self._bytes.setdefault(key, tensor.raw_data)
            self._ranks[key] = max(self._ranks.get(key, 0), len(tensor.dims))
            self.users.setdefault(key, set()).add(name)
            tensor.ClearField("raw_data")
        self._graphs[name] = (proto, keys)

    @property
    def names(self) -> list[str]:
        """The graphs that are still in the pool."""
        return list(self._graphs)

    @property
    def shared(self) -> list[str]:
        """The tensors that several graphs have, largest first."""
        found = [key for key, names in self.users.items() if len(names) > 1]
        return sorted(found, key=lambda key: (-len(self._bytes[key]), key))

    def matrix_bytes(self, keys: Sequence[str]) -> int:
        """Return the bytes of the tensors with two or more axes."""
        return sum(len(self._bytes[key]) for key in keys if self._ranks[key] > 1)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of weights of a graph, as if it were alone."""
        return sum(len(self._bytes[key]) for key in self._graphs[name][1].values())

    def own(self, name: str) -> list[str]:
        """Return the tensors that only this graph has."""
        return [key for key in dict.fromkeys(self._graphs[name][1].values()) if len(self.users[key]) == 1]

    def own_bytes(self, name: str) -> int:
        """Return the bytes of `own`, each as often as the graph has it."""
        own = set(self.own(name))
        return sum(len(self._bytes[key]) for key in self._graphs[name][1].values() if key in own)

    def write(self, keys: Sequence[str], folder: Path, stem: str) -> tuple[Path, Mapping[str, tuple[str, int]]]:
        """Write tensors into one file, named by its content so that no graph can meet another export's data.

        Returns:
            The file, and for each tensor the file's name and the offset.
        """
        at: dict[str, tuple[str, int]] = {}
        hasher, end = hashlib.sha256(), 0
        tmp = folder / f"{stem}.part"
        with tmp.open("wb") as file:
            for key in keys:
                data = self._bytes[key]
                align = GRANULE if len(data) >= GRANULE else PAGE
                gap = bytes(-end % align)
                for part in (gap, data):
                    file.write(part)
                    hasher.update(part)
                at[key] = ("", end + len(gap))
                end += len(gap) + len(data)
        path = tmp.rename(folder / f"{stem}-{hasher.hexdigest()[:12]}.data")
        return path, {key: (path.name, offset) for key, (_, offset) in at.items()}

    def release(self, name: str, places: Mapping[str, tuple[str, int]]) -> onnx.ModelProto:
        """Return a graph and remove it: tensors in ``places`` become references, the others are inside it."""
        proto, keys = self._graphs.pop(name)
        for tensor in proto.graph.initializer:
            key = keys.get(tensor.name)
            if key is None:
                continue
            data = self._bytes[key]
            if key not in places:
                tensor.raw_data = data
                continue
            location, offset = places[key]
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for field, value in (("location", location), ("offset", offset), ("length", len(data))):
                tensor.external_data.add(key=field, value=str(value))
        return proto


def digest(data: bytes | memoryview) -> str:
    """Return the sha256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
