"""The interface of a KServe v2 client, and the types that its implementations share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vtk.errors import UnavailableError, UsageError
from vtk.profiling.server.pool import Pool

NUMPY: dict[str, Any] = {
    "FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8, "INT8": np.int8, "UINT16": np.uint16, "INT16": np.int16,
    "UINT32": np.uint32, "INT32": np.int32, "FP64": np.float64,
}  # fmt: skip
"""NumPy types of images by their KServe names."""


MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError, MemoryError)
"""Exceptions raised when parsing a value that does not follow the protocol."""


class RequestFailed(Exception):
    """The server answered with an error, or too late."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output as the server describes it; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """A model on a server.

    Attributes:
        name: on the server.
        version: the one that answers.
        platform: inference platform, as the server names it.
        inputs: of a request.
        outputs: of an answer.
    """

    name: str
    version: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def image(self) -> TensorSpec:
        """Return the input that takes images.

        Raises:
            UsageError: there is none.
        """
        found = [i for i in self.inputs if i.datatype in NUMPY and len(i.shape) == 4]
        if len(found) != 1:
            inputs = ", ".join(f"{i.name} {i.datatype} {list(i.shape)}" for i in self.inputs)
            raise UsageError(
                f"the inputs of `{self.name}` are {inputs}; one must be images: four axes, floating point or integers"
            )
        return found[0]

    def logits(self) -> str:
        """Return the name of the output that is compared: ``logits``, or the only one."""
        names = [o.name for o in self.outputs]
        return "logits" if "logits" in names or not names else names[0]


def model_info(name: str, value: Any) -> ModelInfo:
    """Read a server's description of a model.

    Raises:
        UnavailableError: it is not one.
    """
    try:
        inputs, outputs = (
            tuple(
                TensorSpec(str(t["name"]), str(t["datatype"]), tuple(map(int, t["shape"]))) for t in value.get(key, [])
            )
            for key in ("inputs", "outputs")
        )
        versions = [str(v) for v in value.get("versions") or [""]]
        version = max(versions, key=lambda v: (len(v), v))
        return ModelInfo(name, version, str(value.get("platform", "")), inputs, outputs)
    except MALFORMED as error:
        raise UnavailableError(
            f"the server's description of `{name}` is not of the KServe v2 protocol; give the address of a server that "
            "speaks it"
        ) from error


@dataclass(frozen=True)
class Counters:
    """The server's own account of a model since it started; nanoseconds summed over requests.

    Attributes:
        requests: answered.
        images: in them.
        executions: of the model: fewer than requests where the server joined them.
        queue_ns: waiting.
        compute_ns: input, inference and output.
    """

    requests: int
    images: int
    executions: int
    queue_ns: int
    compute_ns: int

    def since(self, before: "Counters") -> "Counters":
        """Return what happened after ``before``."""
        return Counters(*(getattr(self, n) - getattr(before, n) for n in self.__dataclass_fields__))


def read_counters(stats: Mapping[str, Any], version: str) -> Counters | None:
    """Read Triton's statistics of a model, None where there are none of this version.

    Args:
        stats: answer of ``v2/models/NAME/stats``; numbers may be text, as in protobuf's JSON.
        version: of the model; empty for the only one.
    """
    found = [m for m in stats.get("model_stats", []) if not version or str(m.get("version", "")) in ("", version)]
    if not found:
        return None
    model, times = found[0], found[0].get("inference_stats", {})

    def of(name: str, key: str) -> int:
        return int(times.get(name, {}).get(key, 0))

    compute = sum(of(name, "ns") for name in ("compute_input", "compute_infer", "compute_output"))
    return Counters(
        of("success", "count"), int(model.get("inference_count", 0)), int(model.get("execution_count", 0)),
        of("queue", "ns"), compute,
    )  # fmt: skip


class Client(Protocol):
    """A connection; `infer` may be called by many threads at once."""

    def models(self) -> list[str]:
        """Return the names of the models that are ready; empty where the server does not tell."""
        ...

    def info(self, model: str) -> ModelInfo:
        """Describe a model.

        Raises:
            UnavailableError: the server is not there, or has no such model.
        """
        ...

    def counters(self, info: ModelInfo) -> Counters | None:
        """Return the server's statistics, None where it keeps none."""
        ...

    def request(self, info: ModelInfo, pool: Pool, number: int, batch: int, texts: Mapping[str, str]) -> Any:
        """Encode request ``number``, before the clock runs.

        Args:
            info: whom to ask.
            pool: whose images are sent.
            number: of the request, which decides its images and is in them.
            batch: images.
            texts: the value of each other input, the same for all images.
        """
        ...

    def infer(self, request: Any) -> Any:
        """Send a request and return the answer, undecoded.

        Raises:
            RequestFailed: an error, or no complete answer in time.
        """
        ...

    def decode(self, answer: Any, output: str) -> "np.ndarray[Any, Any]":
        """Return one output of an answer.

        Raises:
            RequestFailed: it is not there, or not as the protocol has it.
        """
        ...

    def close(self) -> None:
        """Close every connection."""
        ...


def unreachable(url: str, reason: object) -> UnavailableError:
    """Return the error of a server that does not answer."""
    return UnavailableError(f"no server answers at {url} ({reason}); start it, or give another --server or --protocol")
