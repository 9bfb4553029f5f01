"""KServe v2 over gRPC, through tritonclient."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vtk.errors import UnavailableError
from vtk.profiling.server.client import Counters, ModelInfo, RequestFailed, TensorSpec, read_counters, unreachable


class GrpcClient:
    """A server at ``host:port``.

    Raises:
        UnavailableError: nobody answers there, or tritonclient is not installed.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            import tritonclient.grpc as grpc  # type: ignore[import-untyped,unused-ignore]
        except (ImportError, RuntimeError) as error:  # it raises a RuntimeError where its extra is missing
            text = f"`--protocol grpc` needs tritonclient[grpc] ({error}); install it, or use --protocol http"
            raise UnavailableError(text.splitlines()[0]) from error
        self._grpc, self.timeout = grpc, timeout
        self.url = url.partition("://")[2] or url
        self._client = grpc.InferenceServerClient(self.url)
        try:
            self._client.get_server_metadata(client_timeout=min(timeout, 10.0))
        except grpc.InferenceServerException as error:
            raise unreachable(url, _told(error)) from error

    def models(self) -> list[str]:
        """Return the names of the models that are ready."""
        try:
            found = self._client.get_model_repository_index(as_json=True)
        except self._grpc.InferenceServerException:
            return []
        return [str(m["name"]) for m in found.get("models", []) if m.get("state", "READY") == "READY"]

    def info(self, model: str) -> ModelInfo:
        """Describe a model."""
        try:
            found = self._client.get_model_metadata(model)
        except self._grpc.InferenceServerException as error:
            raise UnavailableError(f"{self.url} has no model `{model}` that is ready ({_told(error)})") from error
        inputs, outputs = (
            tuple(TensorSpec(t.name, t.datatype, tuple(t.shape)) for t in tensors)
            for tensors in (found.inputs, found.outputs)
        )
        versions = list(found.versions) or [""]
        return ModelInfo(model, max(versions, key=lambda v: (len(v), v)), found.platform, inputs, outputs)

    def counters(self, info: ModelInfo) -> Counters | None:
        """Return the server's statistics."""
        try:
            return read_counters(
                self._client.get_inference_statistics(info.name, info.version, as_json=True), info.version
            )
        except self._grpc.InferenceServerException:
            return None

    def payload(self, info: ModelInfo, tensors: Mapping[str, "np.ndarray[Any, Any]"]) -> Any:
        """Return the arguments of the call."""
        specs = {t.name: t.datatype for t in info.inputs}
        inputs = []
        for name, value in tensors.items():
            entry = self._grpc.InferInput(name, list(value.shape), specs[name])
            entry.set_data_from_numpy(value.astype(np.object_) if specs[name] == "BYTES" else value)
            inputs.append(entry)
        outputs = [self._grpc.InferRequestedOutput(o.name) for o in info.outputs]
        return {"model_name": info.name, "model_version": info.version, "inputs": inputs, "outputs": outputs or None}

    def infer(self, payload: Any) -> Any:
        """Return tritonclient's result."""
        try:
            return self._client.infer(**payload, client_timeout=self.timeout)
        except self._grpc.InferenceServerException as error:
            raise RequestFailed(_told(error)) from error

    def decode(self, answer: Any, output: str) -> "np.ndarray[Any, Any]":
        """Return one output of an answer."""
        found: np.ndarray[Any, Any] | None = answer.as_numpy(output)
        if found is None:
            raise RequestFailed(f"the answer has no output `{output}`")
        return found

    def close(self) -> None:
        """Close the channel."""
        self._client.close()


def _told(error: Any) -> str:
    return " ".join(str(error.message()).split())[:200]
