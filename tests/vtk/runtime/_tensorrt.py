"""A stand-in for TensorRT's Python package that computes on the memory it is given, and for CUDA's streams.

Written from NVIDIA's documentation of `ICudaEngine` and `IExecutionContext`, not from the code of the back-end.
"""

import ctypes
import enum
import types
from typing import Any

import numpy as np

NUMPY = {"FLOAT": np.float32, "HALF": np.float16}


class FakeTensorrt(types.ModuleType):
    """`tensorrt` 10: shapes before addresses, output shapes from input shapes, nothing run without all of them."""

    __version__ = "10.9.0.34"

    def __init__(
        self, weight: np.ndarray, *, kind: str = "FLOAT", least: int = 1, most: int = 4, image: str = "pixel_values",
        logits: str = "logits",
    ) -> None:  # fmt: skip
        super().__init__("tensorrt")
        self.__spec__ = types.SimpleNamespace(name="tensorrt")  # type: ignore[assignment]
        self.weight, self.kind, self.least, self.most = weight, kind, least, most
        self.names = {image: "INPUT", logits: "OUTPUT", "features": "OUTPUT"}
        self.streams: list[int] = []
        self.refuse = ""
        self.TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
        self.DataType = enum.Enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64")
        self.Logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, level: None})
        outer = self

        class Runtime:
            def __init__(self, logger: Any) -> None: ...

            def deserialize_cuda_engine(self, data: bytes) -> "Engine | None":
                return Engine() if data == b"engine" else None

        class Engine:
            num_io_tensors = property(lambda self: len(outer.names))

            def get_tensor_name(self, index: int) -> str:
                return list(outer.names)[index]

            def get_tensor_mode(self, name: str) -> Any:
                return outer.TensorIOMode[outer.names[name]]

            def get_tensor_dtype(self, name: str) -> Any:
                return outer.DataType[outer.kind]

            def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
                assert (name, index) == (image, 0)
                return [(n, 3, 4, 6) for n in (outer.least, outer.least, outer.most)]

            def create_execution_context(self) -> "Context":
                return Context()

        class Context:
            def __init__(self) -> None:
                self.batch = -1
                self.addresses: dict[str, int] = {}

            def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
                if outer.names[name] != "INPUT" or not outer.least <= shape[0] <= outer.most or shape[1:] != (3, 4, 6):
                    return False
                self.batch = shape[0]
                return True

            def get_tensor_shape(self, name: str) -> tuple[int, ...]:
                return (self.batch, {logits: 3, "features": 2}[name])

            def set_tensor_address(self, name: str, memory: int) -> bool:
                assert isinstance(memory, int)
                self.addresses[name] = memory
                return True

            def execute_async_v3(self, stream_handle: int) -> bool:
                outer.streams.append(stream_handle)
                if outer.refuse or set(self.addresses) != set(outer.names):
                    return False
                pixels = self._view(image, (self.batch, 72)).astype(np.float64)
                self._view(logits, (self.batch, 3))[:] = pixels @ outer.weight
                self._view("features", (self.batch, 2))[:] = pixels[:, :2]
                self.addresses.clear()  # stale ones must not be relied on
                return True

            def _view(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
                dtype = np.dtype(NUMPY[outer.kind])
                size = int(np.prod(shape)) * dtype.itemsize
                return np.frombuffer((ctypes.c_char * size).from_address(self.addresses[name]), dtype).reshape(shape)

        self.Runtime = Runtime


class Streams:
    """What happened in which order: torch's stream waits for the engine's and the other way round."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.cuda_stream = name, log, 4711

    def wait_stream(self, other: "Streams") -> None:
        self.log.append(f"{self.name} waits for {other.name}")
