"""KServe v2 over gRPC, through tritonclient."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vtk.errors import UnavailableError
from vtk.packages import PACKAGES
from vtk.profiling.server.client import (
    MALFORMED,
    Counters,
    ModelInfo,
    RequestFailed,
    TensorSpec,
    read_counters,
    unreachable,
)
from vtk.profiling.server.pool import Pool


class GrpcClient:
    """A server at ``host:port``.

    Raises:
        UnavailableError: nobody answers there, or tritonclient is not installed.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            import tritonclient.grpc as grpc  # type: ignore[import-untyped,unused-ignore]
        except (ImportError, RuntimeError) as error:  # it raises a RuntimeError where its extra is missing
            reason = str(error).partition("\n")[0]
            pip = PACKAGES["tritonclient"].install
            raise UnavailableError(
                f"`--protocol grpc` needs tritonclient[grpc] ({reason}): {pip}, or use --protocol http"
            ) from error
        self._grpc, self.timeout = grpc, timeout
        self.url = url.partition("://")[2] or url
        self._client = grpc.InferenceServerClient(self.url)
        try:
            self._client.get_server_metadata(client_timeout=timeout)
        except grpc.InferenceServerException as error:
            raise unreachable(url, _reason(error)) from error

    def models(self) -> list[str]:
        """Return the names of the models that are ready."""
        try:
            found = self._client.get_model_repository_index(as_json=True, client_timeout=self.timeout)
        except self._grpc.InferenceServerException:
            return []
        return [str(m["name"]) for m in found.get("models", []) if m.get("state", "READY") == "READY"]

    def info(self, model: str) -> ModelInfo:
        """Describe a model."""
        try:
            found = self._client.get_model_metadata(model, client_timeout=self.timeout)
        except self._grpc.InferenceServerException as error:
            raise UnavailableError(f"{self.url} has no model `{model}` that is ready ({_reason(error)})") from error
        inputs, outputs = (
            tuple(TensorSpec(t.name, t.datatype, tuple(t.shape)) for t in tensors)
            for tensors in (found.inputs, found.outputs)
        )
        versions = list(found.versions) or [""]
        return ModelInfo(model, max(versions, key=lambda v: (len(v), v)), found.platform, inputs, outputs)

    def counters(self, info: ModelInfo) -> Counters | None:
        """Return the server's statistics."""
        try:
            found = self._client.get_inference_statistics(
                info.name, info.version, as_json=True, client_timeout=self.timeout
            )
            return read_counters(found, info.version)
        except (self._grpc.InferenceServerException, *MALFORMED):
            return None

    def request(self, info: ModelInfo, pool: Pool, number: int, batch: int, texts: Mapping[str, str]) -> Any:
        """Return the arguments of the call."""
        image = info.image()
        values: dict[str, np.ndarray[Any, Any]] = {image.name: pool.batch(number, batch)}
        for name, text in texts.items():
            shape = next((batch, *(1 for _ in t.shape[1:])) for t in info.inputs if t.name == name)
            values[name] = np.full(shape, text, dtype=np.object_)
        inputs = []
        for name, value in values.items():
            kind = image.datatype if name == image.name else "BYTES"
            inputs.append(self._grpc.InferInput(name, list(value.shape), kind))
            inputs[-1].set_data_from_numpy(value)
        outputs = [self._grpc.InferRequestedOutput(o.name) for o in info.outputs]
        return {"model_name": info.name, "model_version": info.version, "inputs": inputs, "outputs": outputs or None}

    def infer(self, request: Any) -> Any:
        """Return tritonclient's result; its deadline is of the whole call."""
        try:
            return self._client.infer(**request, client_timeout=self.timeout)
        except self._grpc.InferenceServerException as error:
            raise RequestFailed(_reason(error)) from error

    def decode(self, answer: Any, output: str) -> "np.ndarray[Any, Any]":
        """Return one output of an answer."""
        try:
            found: np.ndarray[Any, Any] | None = answer.as_numpy(output)
        except (self._grpc.InferenceServerException, *MALFORMED) as error:
            raise RequestFailed(f"the answer cannot be read ({type(error).__name__})") from error
        if found is None:
            raise RequestFailed(f"the answer has no output `{output}`")
        return found

    def close(self) -> None:
        """Close the channel."""
        self._client.close()


def _reason(error: Any) -> str:
    return " ".join(str(error.message()).split())[:200]
