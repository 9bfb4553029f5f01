"""Runs TensorRT engines with TensorRT's Python package (10 and newer), on torch's memory.

Not yet run on a device: written from the documentation of `IExecutionContext` and `ICudaEngine`, and tested with a
stand-in that follows it.
"""

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vtk.errors import DataError, UnavailableError, UsageError
from vtk.models.devices import DTYPES, dtype_name
from vtk.runtime.engine_files import check_model, check_stamp, engine_beside, read_profile, read_stamp
from vtk.runtime.export_facts import PLAIN, Facts
from vtk.runtime.source import Source

_TYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT8": torch.int8, "UINT8": torch.uint8,
    "INT32": torch.int32, "INT64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


class TensorrtBackend:
    """One engine with one execution context; inputs and outputs stay on the device.

    Attributes:
        least: fewest images of one call.
        most: most images of one call.
        arithmetic: ``tf32`` if products of an fp32 file are rounded to TF32, TensorRT's default.
    """

    name = "tensorrt"

    def __init__(
        self, trt: Any, data: bytes, path: Path, device: torch.device, dtype: torch.dtype, stream: Any, tf32: bool,
        facts: Facts = PLAIN,
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.path = device, dtype, path
        self.arithmetic = "tf32" if tf32 and dtype == torch.float32 else ""
        self.load_s = 0.0
        self.version = str(trt.__version__)
        self._stream = stream
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self._engine = self._runtime.deserialize_cuda_engine(data)
        self._context = None if self._engine is None else self._engine.create_execution_context()
        if self._context is None:
            raise DataError(f"TensorRT {self.version} does not load {path}; run build_engine.py in its folder again")
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        kinds = {str(name): self._engine.get_tensor_mode(name) for name in names}
        outputs = [name for name, kind in kinds.items() if kind == trt.TensorIOMode.OUTPUT]
        inputs = [name for name, kind in kinds.items() if kind == trt.TensorIOMode.INPUT]
        self._facts, self._input = facts, facts.name("pixel_values")
        self.outputs = [facts.term(name) for name in outputs]
        if inputs != [self._input] or "logits" not in self.outputs:
            raise DataError(
                f"{path} has inputs {inputs} and outputs {outputs}; this toolkit runs engines with one input "
                "`pixel_values` and an output `logits`"
            )
        self._types = {name: self._type(trt, name) for name in kinds}
        least, _, most = (tuple(s) for s in self._engine.get_tensor_profile_shape(self._input, 0))
        self.least, self.most, self.size = int(least[0]), int(most[0]), tuple(map(int, most[1:]))
        self.batch: int | None = self.least if self.least == self.most else None

    @classmethod
    def check(cls) -> None:
        """Check that TensorRT's Python package and CUDA are available."""
        if importlib.util.find_spec("tensorrt") is None:
            raise UnavailableError(
                "`tensorrt` runs engines with TensorRT's Python package, which is not installed; pip install tensorrt, "
                "or use ort-cuda with the .onnx file"
            )
        if not torch.cuda.is_available():
            raise UnavailableError("`tensorrt` was requested, but torch sees no CUDA device; `vtk doctor` says why")

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Load an engine, or the one beside an ONNX file, if its stamp fits this machine.

        ``threads`` has no effect; there are no options.
        """
        if options:
            raise UsageError(f"back-end `tensorrt` has no option `{min(options)}`; it has none")
        path = engine_beside(source) if source.kind in ("tensorrt", "onnx") else None
        if path is None:
            raise UsageError(f"`tensorrt` runs engines and {source.name} has none; `vtk export tensorrt --build` makes "
                             "one")  # fmt: skip
        source.require_trust(path)
        if device.type != "cuda":
            raise UsageError(f"`tensorrt` runs on CUDA, not on {device}; leave out --device, or give --device cuda")
        cls.check()
        start = time.perf_counter()
        try:
            import tensorrt as trt  # type: ignore[import-not-found,unused-ignore]
        except (ImportError, OSError) as error:
            raise UnavailableError(f"TensorRT's Python package does not load here ({error}); `vtk doctor`") from error
        stamp = read_stamp(path)
        check_model(path, stamp)
        check_stamp(
            path, stamp, tensorrt=str(trt.__version__), gpu=torch.cuda.get_device_name(device),
            compute_capability="{}.{}".format(*torch.cuda.get_device_capability(device)),
        )  # fmt: skip
        profile = read_profile(path, stamp)
        if dtype != DTYPES[profile["precision"]]:
            raise UsageError(
                f"{path} computes in {profile['precision']}, not in {dtype_name(dtype)}; an engine's "
                f"precision is fixed, give --precision {profile['precision']}"
            )
        with torch.cuda.device(device):  # TensorRT takes the device that is current
            backend = cls(trt, path.read_bytes(), path, device, dtype, torch.cuda.Stream(device), profile["tf32"],
                          Facts(names=profile.get("names", {})))  # fmt: skip
        backend.load_s = time.perf_counter() - start
        return backend

    @property
    def provider(self) -> str:
        """``TensorRT VERSION (GPU)``, and whether products are rounded to TF32."""
        return f"TensorRT {self.version} ({torch.cuda.get_device_name(self.device)}){', TF32' * bool(self.arithmetic)}"

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to the outputs on the device.

        Raises:
            UsageError: images of another size, or fewer or more than the engine takes.
            UnavailableError: TensorRT refuses the call; its messages on stderr say why.
        """
        images = inputs["pixel_values"]
        if images.ndim != 4 or tuple(images.shape[1:]) != self.size or not self.least <= len(images) <= self.most:
            wanted = f"({self.least} to {self.most}, {', '.join(map(str, self.size))})"
            raise UsageError(f"images are {tuple(images.shape)}; this engine takes {wanted}: resize or split them")
        images = images.detach().to(self.device, self._types[self._input], non_blocking=True).contiguous()
        context: Any = self._context
        done = context.set_input_shape(self._input, tuple(images.shape))
        done = done and context.set_tensor_address(self._input, images.data_ptr())
        results: dict[str, Tensor] = {}
        for term in self.outputs:
            name = self._facts.name(term)
            # known only once the input's shape is
            shape = tuple(map(int, context.get_tensor_shape(name)))
            if min(shape, default=0) < 0:
                raise UnavailableError(f"{self.path}: the shape of `{name}` depends on the values; this is not run")
            results[term] = torch.empty(shape, dtype=self._types[name], device=self.device)
            done = done and context.set_tensor_address(name, results[term].data_ptr())
        # Of a stream of its own: on the default one TensorRT waits for the device at each call. What torch did with the
        # images comes first, and whatever it does next, with the memory of images and outputs too, comes afterwards.
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        done = done and context.execute_async_v3(self._stream.cuda_stream)
        current.wait_stream(self._stream)
        if not done:
            raise UnavailableError(
                f"TensorRT {self.version} does not run {self.path} with images {tuple(images.shape)}"
            )
        return results

    def synchronize(self) -> None:
        """Wait for the CUDA device."""
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Drop context, engine and runtime, in this order."""
        self._context = self._engine = self._runtime = None

    def _type(self, trt: Any, name: str) -> torch.dtype:
        kind = self._engine.get_tensor_dtype(name)
        for word, dtype in _TYPES.items():
            if kind == getattr(trt.DataType, word, None):
                return dtype
        raise DataError(f"{self.path}: `{name}` is {kind}; this toolkit has no such type")
