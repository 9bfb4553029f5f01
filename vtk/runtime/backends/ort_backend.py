"""Runs ONNX files with ONNX Runtime, on the CPU or on CUDA."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vtk.errors import DataError, UnavailableError, UsageError
from vtk.models.devices import DTYPES, dtype_name
from vtk.packages import require
from vtk.runtime.backends.ort_session import open_session
from vtk.runtime.export_facts import PLAIN, Facts
from vtk.runtime.source import Source

_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(uint8)": torch.uint8,
    "tensor(int32)": torch.int32,
    "tensor(int8)": torch.int8,
    "tensor(uint16)": torch.uint16,
    "tensor(int16)": torch.int16,
    "tensor(uint32)": torch.uint32,
    "tensor(double)": torch.float64,
    "tensor(bool)": torch.bool,
}
# of TensorProto.DataType
_ONNX_NUMBERS = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.uint16: 4, torch.int16: 5, torch.int32: 6, torch.float16: 10,
    torch.bool: 9, torch.float64: 11, torch.uint32: 12, torch.bfloat16: 16,
}  # fmt: skip
_LOGITS = {"logits", "probabilities"}


class OrtCpuBackend:
    """ONNX Runtime's CPU provider.

    Attributes:
        session: the ``onnxruntime.InferenceSession``.
        input: of images, as this toolkit calls it.
        outputs: the same of the outputs.
    """

    name = "ort-cpu"
    execution_provider = "CPUExecutionProvider"
    apart = False
    """Whether each image needs a call of its own (`Facts.apart`)."""
    arithmetic = ""
    """``fp8`` if the wide products of a file read e4m3."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        threads: int | None,
        optimize: bool,
        raw: bool = False,
        prepack: bool = True,
        facts: Facts = PLAIN,
        temperature: float = 1.0,
    ) -> None:
        self.device = device
        self.load_s = 0.0
        self.session = open_session(path, self.execution_provider, device, threads, optimize, prepack, facts.fp8)
        self.provider: str = self.session.get_providers()[0]
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self._facts, self._temperature = facts, temperature
        self.outputs = [facts.term(o.name) for o in outputs]
        self.input: str = facts.term(inputs[0].name)
        # a file of many tasks also takes the number of each image's task
        self.has_task = [facts.term(i.name) for i in inputs[1:]] == ["task"]
        known = len(inputs) == 1 or self.has_task
        if not raw and (not known or self.input != "pixel_values" or not _LOGITS.intersection(self.outputs)):
            raise DataError(
                f"{path} has inputs {[i.name for i in inputs]} and outputs {[o.name for o in outputs]}; "
                "this toolkit runs files with one input `pixel_values` and an output `logits`"
            )
        if inputs[0].type not in _TYPES:
            raise DataError(f"{path}: `{inputs[0].name}` is {inputs[0].type}; float, float16 and bfloat16 can be run")
        self.input_dtype = _TYPES[inputs[0].type]
        # of raw images the type says nothing of the precision
        self.dtype = torch.float32 if self.input == "images" else self.input_dtype
        self.batch: int | None = inputs[0].shape[0] if isinstance(inputs[0].shape[0], int) else None

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Open a session on ``source.path``.

        Options: `optimize`, False disables graph optimisations; `raw` allows a file whose input is ``images`` or that
        returns no logits; `prepack`, False keeps weights memory-mapped and shared with other sessions, without a copy
        that is faster to multiply.
        """
        if source.kind != "onnx" or source.path is None:
            raise UsageError(f"`{cls.name}` runs .onnx files, not the {source.kind} {source.name}: `vtk export onnx`")
        if unknown := sorted(set(options) - {"optimize", "raw", "prepack"}):
            raise UsageError(f"back-end `{cls.name}` has no option `{unknown[0]}`; it has `optimize`, `prepack`")
        raw = bool(options.get("raw"))
        if source.facts.preprocessing and not raw:
            raise UsageError(
                f"{source.path} takes raw images, which this command has resized and normalised already; give it a "
                "file exported without --with-preproc"
            )
        start = time.perf_counter()
        switches = bool(options.get("optimize", True)), raw, bool(options.get("prepack", True)), source.facts
        backend = cls(source.path, cls._device(device), threads, *switches, source.card.temperature)
        backend.dtype = DTYPES[source.facts.precision]
        backend.apart = source.facts.apart
        backend.arithmetic = "fp8" if source.facts.fp8 else ""
        if dtype != backend.dtype:
            backend.close()
            raise UsageError(
                f"{source.path} computes in {source.facts.precision}, not in {dtype_name(dtype)}; a file's "
                f"precision is fixed, give --precision {source.facts.precision}"
            )
        backend.load_s = time.perf_counter() - start
        return backend

    @classmethod
    def check(cls) -> None:
        """Check that the installed onnxruntime has the provider."""
        require("onnxruntime")
        import onnxruntime as ort

        if cls.execution_provider not in ort.get_available_providers():
            raise UnavailableError(
                f"`{cls.name}` was requested, but this onnxruntime has {', '.join(ort.get_available_providers())}; "
                "`vtk doctor` says which wheel to install"
            )

    @staticmethod
    def _device(device: torch.device) -> torch.device:
        if device.type != "cpu":
            raise UsageError(f"`ort-cpu` runs on the CPU, not on {device}; use --backend ort-cuda")
        return device

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map the input, any floating type and device, to the outputs, all by this toolkit's names.

        ``pixel_values`` is (B, 3, H, W), ``images`` (B, height, width, 3) of the file's type. ``logits`` are (B,
        classes); of a file that returns ``probabilities`` they are the logarithms times the card's temperature. A file
        of many tasks also takes ``task``, integers (B,), and returns ``num_classes``.
        """
        feeds = self._feeds(inputs)
        if torch.bfloat16 in (self.input_dtype, *self._output_types()):  # numpy has no such type
            return with_logits(self._run_bound(feeds), self._temperature)
        values = self.session.run(None, {name: feed.numpy() for name, feed in feeds.items()})
        return with_logits(
            {name: torch.as_tensor(v) for name, v in zip(self.outputs, values, strict=True)}, self._temperature
        )

    def file_name(self, term: str) -> str:
        """Return what the file calls an input or output."""
        return self._facts.name(term)

    def _feeds(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the file's inputs by its names, on the device, in its types; images first."""
        images = inputs[self.input].detach().to(self.device, self.input_dtype).contiguous()
        feeds = {self._facts.name(self.input): images}
        if self.has_task:
            if "task" not in inputs:
                raise UsageError("this file holds many tasks and needs `task`, the number of each image's task")
            feeds[self._facts.name("task")] = inputs["task"].detach().to(self.device, torch.int32).contiguous()
        return feeds

    def _output_types(self) -> list[torch.dtype]:
        return [_TYPES[o.type] for o in self.session.get_outputs()]

    def _run_bound(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run on torch's own memory."""
        images = next(iter(feeds.values()))
        device = images.device
        place = (device.type, device.index or 0)
        binding = self.session.io_binding()
        for name, feed in feeds.items():
            binding.bind_input(name, *place, _ONNX_NUMBERS[feed.dtype], tuple(feed.shape), feed.data_ptr())
        results = {}
        for entry in self.session.get_outputs():
            dtype = _TYPES[entry.type]
            # the batch is symbolic, all other axes of logits and features are numbers
            made = torch.empty((len(images), *entry.shape[1:]), dtype=dtype, device=device)
            binding.bind_output(entry.name, *place, _ONNX_NUMBERS[dtype], tuple(made.shape), made.data_ptr())
            results[self._facts.term(entry.name)] = made
        self.session.run_with_iobinding(binding)
        return results

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
        """Check that there are a CUDA device and the provider; whether it loads is seen on loading."""
        if not torch.cuda.is_available():
            raise UnavailableError(f"`{cls.name}` was requested, but torch sees no CUDA device; `vtk doctor` says why")
        super().check()

    @staticmethod
    def _device(device: torch.device) -> torch.device:
        # the default of `--device` is not a request for the CPU
        return device if device.type == "cuda" else torch.device("cuda", 0)

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map the file's input, any type and device, to its outputs on the device, as `OrtCpuBackend.run` does."""
        feeds = self._feeds(inputs)
        # ONNX Runtime has a stream of its own: torch's work on the input must be done before it starts
        torch.cuda.current_stream(self.device).synchronize()
        return with_logits(self._run_bound(feeds), self._temperature)

    def synchronize(self) -> None:
        """Wait for the CUDA device."""
        torch.cuda.synchronize(self.device)


def with_logits(results: dict[str, Tensor], temperature: float) -> dict[str, Tensor]:
    """Add ``logits`` to outputs that have ``probabilities`` alone: the card's temperature times their logarithms."""
    if "probabilities" in results and "logits" not in results:
        given = results["probabilities"]
        # a probability of 0 is one too small for the type, not an impossible class
        logits = temperature * given.float().clamp_min(torch.finfo(torch.float32).tiny).log()
        results["logits"] = logits.to(given.dtype)
    return results
