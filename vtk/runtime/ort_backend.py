"""An ONNX file in ONNX Runtime, on the CPU or on CUDA, with the provider that really runs checked after loading."""

import contextlib
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vtk.errors import DataError, UnavailableError, UsageError
from vtk.runtime.source import Source

_FATAL = 4
_TYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}


class OrtCpuBackend:
    """ONNX Runtime's CPU provider.

    Attributes:
        session: the ``onnxruntime.InferenceSession``.
    """

    name = "ort-cpu"
    execution_provider = "CPUExecutionProvider"

    def __init__(self, path: Path, device: torch.device, threads: int | None, optimize: bool) -> None:
        self.device = device
        self.load_s = 0.0
        self.session = _open(path, self.execution_provider, device, threads, optimize)
        self.provider: str = self.session.get_providers()[0]
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        if [i.name for i in inputs] != ["pixel_values"] or "logits" not in [o.name for o in outputs]:
            raise DataError(
                f"{path} has inputs {[i.name for i in inputs]} and outputs {[o.name for o in outputs]}; "
                "this toolkit runs files with one input `pixel_values` and an output `logits`"
            )
        if inputs[0].type not in _TYPES:
            raise DataError(f"{path}: `pixel_values` is {inputs[0].type}; float and float16 can be run")
        self.dtype = _TYPES[inputs[0].type]
        self.batch: int | None = inputs[0].shape[0] if isinstance(inputs[0].shape[0], int) else None

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Open a session on ``source.path``; options: `optimize`, False switches the graph optimisations off."""
        if source.kind != "onnx" or source.path is None:
            raise UsageError(f"`{cls.name}` runs .onnx files, not the {source.kind} {source.name}: `vtk export onnx`")
        if unknown := sorted(set(options) - {"optimize"}):
            raise UsageError(f"back-end `{cls.name}` has no option `{unknown[0]}`; it has `optimize`")
        start = time.perf_counter()
        backend = cls(source.path, cls._device(device), threads, bool(options.get("optimize", True)))
        if dtype != backend.dtype:
            backend.close()
            raise UsageError(f"{source.path} computes in {backend.dtype}, not in {dtype}; a file's precision is fixed")
        backend.load_s = time.perf_counter() - start
        return backend

    @classmethod
    def check(cls) -> None:
        """Refuse to work where the installed onnxruntime lacks the provider."""
        import onnxruntime as ort

        if cls.execution_provider not in ort.get_available_providers():
            raise UnavailableError(
                f"`{cls.name}` was asked for, but this onnxruntime has {', '.join(ort.get_available_providers())}; "
                "`vtk doctor` says which wheel to install"
            )

    @staticmethod
    def _device(device: torch.device) -> torch.device:
        if device.type != "cpu":
            raise UsageError(f"`ort-cpu` runs on the CPU, not on {device}; use --backend ort-cuda")
        return device

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes)."""
        images = inputs["pixel_values"].detach().to("cpu", self.dtype).contiguous()
        (logits,) = self.session.run(["logits"], {"pixel_values": images.numpy()})
        return {"logits": torch.from_numpy(logits)}

    def synchronize(self) -> None:
        """Do nothing: ONNX Runtime returns when the result is complete."""

    def close(self) -> None:
        """Drop the session and its memory."""
        self.session = None


class OrtCudaBackend(OrtCpuBackend):
    """ONNX Runtime's CUDA provider; inputs and outputs stay on the device."""

    name = "ort-cuda"
    execution_provider = "CUDAExecutionProvider"

    @classmethod
    def check(cls) -> None:
        """Refuse to work without a CUDA device or without the provider; whether it loads shows on loading."""
        if not torch.cuda.is_available():
            raise UnavailableError("`ort-cuda` was asked for, but torch sees no CUDA device; `vtk doctor` says why")
        super().check()

    @staticmethod
    def _device(device: torch.device) -> torch.device:
        # `--device` left at its default is not a wish for the CPU
        return device if device.type == "cuda" else torch.device("cuda", 0)

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes) on the device."""
        images = inputs["pixel_values"].detach().to(self.device, self.dtype).contiguous()
        shape = self.session.get_outputs()[0].shape
        logits = torch.empty((len(images), *shape[1:]), dtype=self.dtype, device=self.device)
        binding = self.session.io_binding()
        kind = np.float16 if self.dtype == torch.float16 else np.float32
        where = ("cuda", self.device.index, kind)
        binding.bind_input("pixel_values", *where, tuple(images.shape), images.data_ptr())
        binding.bind_output("logits", *where, tuple(logits.shape), logits.data_ptr())
        # ONNX Runtime has a stream of its own: torch's work on the input must be done before it starts
        torch.cuda.current_stream(self.device).synchronize()
        self.session.run_with_iobinding(binding)
        return {"logits": logits}

    def synchronize(self) -> None:
        """Wait for the CUDA device."""
        torch.cuda.synchronize(self.device)


def _open(path: Path, provider: str, device: torch.device, threads: int | None, optimize: bool) -> Any:
    """Open a session whose first provider is ``provider``, or raise; ONNX Runtime itself falls back without a word."""
    import onnxruntime as ort

    ort.set_default_logger_severity(_FATAL)
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = threads or torch.get_num_threads()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    wanted: list[Any] = [provider]
    if provider != "CPUExecutionProvider":
        # TF32 keeps ten bits of a mantissa: no fp32 result, and beyond the tolerance that fp32 outputs are held to
        wanted = [(provider, {"device_id": device.index or 0, "use_tf32": "0"}), "CPUExecutionProvider"]
    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise):
            session = ort.InferenceSession(path, options, providers=wanted, enable_fallback=0)
    except Exception as error:  # onnxruntime has no common base class for its errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if provider != "CPUExecutionProvider":
            raise UnavailableError(f"{provider} was asked for, but onnxruntime cannot use it: {reason}") from error
        raise DataError(f"onnxruntime cannot load {path}: {reason}") from error
    session.disable_fallback()
    if session.get_providers()[0] != provider:
        raise UnavailableError(
            f"{provider} was asked for, but onnxruntime could not load it and would use {session.get_providers()[0]}; "
            "`vtk doctor` says what is missing"
        )
    return session
