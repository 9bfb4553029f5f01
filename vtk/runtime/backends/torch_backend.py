"""The model in torch: as written (``eager``), or compiled by inductor for the batch sizes it meets (``compile``)."""

import time
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from vtk.errors import UnavailableError, UsageError, VtkError
from vtk.models.compile_errors import check_compiler, failure, quiet
from vtk.models.fp32 import FullPrecision
from vtk.runtime.source import Source


class EagerBackend:
    """Plain torch in inference mode; every floating parameter and buffer is held in ``dtype``.

    ``threads`` is torch's global number; `close` puts the earlier one back.
    """

    name = "eager"
    batch: int | None = None
    options: tuple[str, ...] = ("channels_last",)

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, channels_last: bool = False) -> None:
        layout = torch.channels_last if channels_last else torch.preserve_format
        self.model: nn.Module = model.eval().requires_grad_(False).to(device=device, dtype=dtype)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.device, self.dtype, self.layout = device, dtype, layout
        self.load_s = 0.0
        self._threads_before: int | None = None
        self._fp32 = FullPrecision()

    @classmethod
    def check(cls) -> None:
        """Do nothing: torch is always here."""

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Build ``source.model()`` on ``device`` in ``dtype``; options: `channels_last`."""
        if use := {"onnx": "ort-cpu", "aoti": "aoti", "tensorrt": "tensorrt"}.get(source.kind):
            raise UsageError(f"`{cls.name}` runs packs, checkpoints and timm models; for {source.name} use {use}")
        if unknown := sorted(set(options) - set(cls.options)):
            raise UsageError(f"back-end `{cls.name}` has no option `{unknown[0]}`; it has {', '.join(cls.options)}")
        start = time.perf_counter()
        before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            backend = cls(source.model(), device, dtype, **options)
            backend.synchronize()
        except BaseException:
            torch.set_num_threads(before)
            raise
        backend._threads_before = before if threads is not None else None
        backend.load_s = time.perf_counter() - start
        return backend

    @property
    def provider(self) -> str:
        """``torch cpu`` or ``torch cuda (NAME)``."""
        return f"torch {self._where()}"

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes)."""
        with torch.inference_mode():
            images = inputs["pixel_values"].to(self.device, self.dtype, non_blocking=True, memory_format=self.layout)
            return {"logits": self._forward(images)}

    def synchronize(self) -> None:
        """Wait for the CUDA device; on a CPU `run` returns when it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Drop the model and put torch's number of threads back."""
        self.model = nn.Identity()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        self._fp32.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        return logits

    def _where(self) -> str:
        return "cpu" if self.device.type == "cpu" else f"cuda ({torch.cuda.get_device_name(self.device)})"


class CompileBackend(EagerBackend):
    """``torch.compile``, one static program per batch size.

    Dynamo keeps eight programs of a function and then silently runs it uncompiled: call `reset` between batch sizes.
    The first run of a batch size compiles, which can take a minute.
    """

    name = "compile"
    options = ("channels_last", "mode")

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool = False,
        mode: str | None = None,
    ) -> None:
        quiet()
        super().__init__(model, device, dtype, channels_last)
        self.mode = mode
        self.reset()

    @classmethod
    def check(cls) -> None:
        """Refuse to work without a C++ compiler, which inductor needs on the CPU and for its launchers on CUDA."""
        check_compiler("`compile`", "use eager")

    @property
    def provider(self) -> str:
        """``inductor cpu`` or ``inductor cuda (NAME)``."""
        return f"inductor {self._where()}"

    def reset(self) -> None:
        """Forget every compiled program, of the whole process, so that the next batch size is compiled on its own."""
        torch._dynamo.reset()
        self._compiled = torch.compile(self.model, dynamic=False, mode=self.mode)

    def close(self) -> None:
        """Drop the model and its programs."""
        self._compiled = nn.Identity()
        super().close()
        torch._dynamo.reset()

    def _forward(self, images: Tensor) -> Tensor:
        try:
            logits: Tensor = self._compiled(images)
        except (VtkError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if (why := failure(error)) is None:
                raise
            raise UnavailableError(f"torch.compile failed here ({why}); use --backend eager") from error
        return logits
