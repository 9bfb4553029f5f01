"""Opens ONNX Runtime sessions, and checks that the requested provider is the one that runs."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch

from vtk.errors import DataError, UnavailableError
from vtk.packages import require
from vtk.runtime.onnx_file import open_onnx

_FATAL = 4


def _providers(path: Path, provider: str, device: torch.device) -> list[Any]:
    """Return ``provider`` with its options, and the providers of nodes that it does not run."""
    if provider == "CPUExecutionProvider":
        return [provider]
    index = {"device_id": device.index or 0}
    # TF32 keeps ten bits of a mantissa: no fp32 result, and beyond the tolerance that fp32 outputs are held to
    cuda = ("CUDAExecutionProvider", {**index, "use_tf32": "0"})
    if provider == "CUDAExecutionProvider":
        return [cuda, "CPUExecutionProvider"]
    precision = open_onnx(path, many=True).facts.precision
    half = {} if precision == "fp32" else {f"trt_{precision}_enable": "1"}
    # TensorRT's provider names a kept engine by the graph's structure, not by its weights: none is kept, whatever the
    # environment says (ORT_TENSORRT_ENGINE_CACHE_ENABLE), or a model that was trained again gets the old one's
    fresh = {"trt_engine_cache_enable": "0"}
    return [(provider, {**index, **half, **fresh}), cuda, "CPUExecutionProvider"]


def open_session(
    path: Path,
    provider: str,
    device: torch.device,
    threads: int | None,
    optimize: bool,
    prepack: bool = True,
    fp8: bool = False,
) -> Any:
    """Open a session whose first provider is ``provider``, or raise; ONNX Runtime would fall back silently."""
    require("onnxruntime")
    import onnxruntime as ort

    ort.set_default_logger_severity(_FATAL)
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = threads or torch.get_num_threads()
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if fp8:  # its rules for Q/DQ are those of int8, and would let a product of floats read e4m3
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    wanted = _providers(path, provider, device)
    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise):
            session = ort.InferenceSession(path, options, providers=wanted, enable_fallback=0)
    except Exception as error:  # onnxruntime has no common base class for its errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if provider != "CPUExecutionProvider":
            raise UnavailableError(f"{provider} was requested, but onnxruntime cannot use it: {reason}") from error
        raise DataError(f"onnxruntime cannot load {path}: {reason}") from error
    session.disable_fallback()
    if session.get_providers()[0] != provider:
        raise UnavailableError(
            f"{provider} was requested, but onnxruntime could not load it and would use {session.get_providers()[0]}; "
            "`vtk doctor` says what is missing"
        )
    return session
