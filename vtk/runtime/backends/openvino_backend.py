"""Runs ONNX files and OpenVINO's IR with OpenVINO on the CPU, products in fp32 or bf16, int8 where the file has it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vtk.errors import DataError, UsageError
from vtk.models.devices import dtype_name
from vtk.runtime import openvino_runtime as runtime
from vtk.runtime.backends.ort_backend import with_logits
from vtk.runtime.source import Source

_OPTIONS = ("raw", "cache", "streams")
_LOGITS = {"logits", "probabilities"}
_KNOWN = _LOGITS | {"pixel_values", "images", "task", "num_classes", "features", "unknown"}


class OpenvinoBackend:
    """A compiled model and one request of it.

    Attributes:
        compiled: the ``openvino.CompiledModel``.
        dtype: of weights and inputs.
        arithmetic: ``bf16`` where products are rounded to it, else "".
        apart: whether each image needs a call of its own (`Facts.apart`).
    """

    name = "openvino"
    dtype = torch.float32
    fewer = ""

    def __init__(self, compiled: Any, source: Source, precision: str, *, raw: bool = False) -> None:
        self.compiled, self.device, self.load_s = compiled, torch.device("cpu"), 0.0
        self.arithmetic = "" if precision == "fp32" else precision
        self.apart, self._facts, self._temperature = source.facts.apart, source.facts, source.card.temperature
        self._request = compiled.create_infer_request()
        self.outputs = terms_of(compiled.outputs, source, "logits")
        inputs = dict(zip(terms_of(compiled.inputs, source, "pixel_values"), compiled.inputs, strict=True))
        self.has_task = "task" in inputs
        self.input: str = next((name for name in inputs if name != "task"), "")
        known = self.input == "pixel_values" and bool(_LOGITS.intersection(self.outputs))
        if len(inputs) != 1 + self.has_task or not (raw or known):
            raise DataError(
                f"{source.path} has inputs {list(inputs)} and outputs {self.outputs}; "
                "this toolkit runs files with one input of images and an output of logits"
            )
        self._types = {name: _torch_type(value, source) for name, value in inputs.items()}
        self._shape = inputs[self.input].partial_shape
        first = self._shape[0]
        self.batch: int | None = None if first.is_dynamic else first.get_length()

    @classmethod
    def check(cls) -> None:
        """Check that OpenVINO is installed and has a CPU plugin."""
        runtime.capabilities()

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Compile ``source.path``, or read it from the cache of compiled models.

        Options: `raw` allows a file whose input is ``images`` or that returns no logits; `cache`, False compiles
        afresh and keeps nothing; `streams`, calls that may run at once (one by default).
        """
        if source.kind not in ("onnx", "openvino") or source.path is None:
            raise UsageError(
                f"`openvino` runs .onnx files and IR (.xml), not the {source.kind} {source.name}: `vtk export openvino`"
            )
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise UsageError(f"back-end `openvino` has no option `{unknown[0]}`; it has `cache`, `streams`")
        if device.type != "cpu":
            raise UsageError(f"`openvino` runs on the CPU here, not on {device}; give --device cpu")
        precision, facts = dtype_name(dtype), source.facts
        runtime.check_precision(precision)
        if facts.fp8 or facts.precision != "fp32":
            kind = "fp8" if facts.fp8 else facts.precision
            raise UsageError(
                f"`openvino` runs fp32 and int8 files and rounds products to bf16 itself; {source.path} is {kind}: "
                "export it without --dtype"
            )
        raw = bool(options.get("raw"))
        if facts.preprocessing and not raw:
            raise UsageError(
                f"{source.path} takes raw images, which this command has resized and normalised already; give it a "
                "file exported without --with-preproc"
            )
        start = time.perf_counter()
        compiled = runtime.compile_file(
            source.path, precision=precision, threads=threads or torch.get_num_threads(),
            streams=int(options.get("streams", 1)), cache=bool(options.get("cache", True)),
        )  # fmt: skip
        backend = cls(compiled, source, precision, raw=raw)
        if (used := int(compiled.get_property("INFERENCE_NUM_THREADS"))) < (threads or used):
            backend.fewer = f", {used} of {threads} threads"
        backend.load_s = time.perf_counter() - start
        return backend

    @property
    def provider(self) -> str:
        """``OpenVINO VERSION cpu``, and the threads where it takes fewer than requested: one a core at most."""
        return f"OpenVINO {runtime.version().partition('-')[0]} cpu{self.fewer}"

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map the file's input, any floating type and device, to its outputs, as `OrtCpuBackend.run` does.

        Raises:
            UsageError: images of a size or number that the file does not take.
        """
        if self._request is None:
            raise UsageError("this back-end is closed; load it again")
        if self.has_task and "task" not in inputs:
            raise UsageError("this file holds many tasks and needs `task`, the number of each image's task")
        # by their places: the file may call them otherwise, or not at all
        feeds = {
            i: inputs[name].detach().to(self.device, kind).contiguous().numpy()
            for i, (name, kind) in enumerate(self._types.items())
        }
        try:
            # outputs are copied: the request writes the next call's into the same memory
            results = self._request.infer(feeds, share_inputs=True, share_outputs=False)
        except RuntimeError as error:
            shape = tuple(inputs[self.input].shape)
            raise UsageError(
                f"OpenVINO does not run images {shape}, the file takes {self._shape}: {runtime.reason(error)}"
            ) from error
        found = dict(zip(self.outputs, map(torch.from_numpy, results.values()), strict=True))
        return with_logits(found, self._temperature)

    def file_name(self, term: str) -> str:
        """Return what the file calls an input or output."""
        return self._facts.name(term)

    def synchronize(self) -> None:
        """Do nothing: a call returns when the result is complete."""

    def close(self) -> None:
        """Drop the compiled model and its memory."""
        self._request = self.compiled = None


def terms_of(values: Sequence[Any], source: Source, only: str) -> list[str]:
    """Return what this toolkit calls inputs or outputs of a model, each of which may have several names, or none.

    Args:
        values: of the compiled model.
        source: of the model.
        only: what the one input or output of another program's model is.
    """
    if len(values) == 1 and not source.described and not _KNOWN.intersection(values[0].names):
        return [only]
    found = []
    for value in values:
        names = sorted(value.names)
        renamed = [source.facts.term(name) for name in names if source.facts.term(name) != name]
        found.append((renamed or [name for name in names if name in _KNOWN] or names or [""])[0])
    return found


def _torch_type(value: Any, source: Source) -> torch.dtype:
    """Return torch's type of an input."""
    name = str(value.element_type.to_dtype())
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise DataError(f"{source.path}: `{value.any_name}` is {name}; this toolkit has no such type")
    return kind
