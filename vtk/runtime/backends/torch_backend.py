"""Runs models in torch: eagerly (``eager``), or compiled by inductor for each batch size (``compile``)."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from vtk.errors import UnavailableError, UsageError, VtkError
from vtk.models.compiler import check_compiler, failure, quiet
from vtk.runtime.backends.torch_base import TorchBackend
from vtk.runtime.source import Source


class EagerBackend(TorchBackend):
    """Plain torch in inference mode; floating parameters and buffers are in ``dtype``."""

    name = "eager"
    options: tuple[str, ...] = ("channels_last",)

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, channels_last: bool = False) -> None:
        layout = torch.channels_last if channels_last else torch.preserve_format
        self.model: nn.Module = model.eval().requires_grad_(False).to(device=device, dtype=dtype)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.layout = layout
        super().__init__(device, dtype)

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Build ``source.model()`` on ``device`` in ``dtype``; options: `channels_last`."""
        if use := {"onnx": "ort-cpu", "openvino": "openvino", "aoti": "aoti", "tensorrt": "tensorrt"}.get(source.kind):
            raise UsageError(f"`{cls.name}` runs packs, checkpoints and timm models; for {source.name} use {use}")
        cls._check_options(options)
        return cls._load_timed(lambda: cls(source.model(), device, dtype, **options), threads)

    @property
    def provider(self) -> str:
        """``torch cpu`` or ``torch cuda (NAME)``."""
        return f"torch {self._place()}"

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes)."""
        with torch.inference_mode():
            images = inputs["pixel_values"].to(self.device, self.dtype, non_blocking=True, memory_format=self.layout)
            return {"logits": self._forward(images)}

    def close(self) -> None:
        """Drop the model and put torch's settings back."""
        self.model = nn.Identity()
        super().close()

    def _forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        return logits


class CompileBackend(EagerBackend):
    """``torch.compile``, one static program for each batch size.

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
        """Check that there is a C++ compiler, which inductor needs on the CPU and for its launchers on CUDA."""
        check_compiler("`compile`", "use eager")

    @property
    def provider(self) -> str:
        """``inductor cpu`` or ``inductor cuda (NAME)``."""
        return f"inductor {self._place()}"

    def reset(self) -> None:
        """Drop all compiled programs of the process, so that the next batch size is compiled separately."""
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
