"""Tunes a fused model on a CUDA device: its passes are CUDA graphs, timed by CUDA events."""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vtk.errors import UnavailableError, UsageError
from vtk.fused.graph_cache import Captured, GraphCache
from vtk.fused.stages import Plan, check_choices
from vtk.fused.tuning import SECONDS, Timer, tune
from vtk.fused.tuning_result import Tuning
from vtk_kernels import choices
from vtk_kernels._dispatch import HALF
from vtk_kernels.choices import Question

if TYPE_CHECKING:
    from vtk.fused.model import FusedViT

_RUNS_US = 2000.0


class GraphPass:
    """A captured pass.

    Args:
        captured: the graph.
        judge: says of an output in what it is wrong.
    """

    def __init__(self, captured: Captured, judge: Callable[[Tensor], str | None]) -> None:
        self._captured, self._judge = captured, judge

    def __call__(self) -> None:
        """Replay."""
        self._captured.graph.replay()

    def wrong(self) -> str | None:
        """Judge what a replay gives."""
        self()
        return self._judge(self._captured.static_out)


class ModelSubject:
    """A model at one batch size and image size, on random images.

    Its output may differ from that of the same model in fp32 by twice as much as plain torch's does in its own type.

    Args:
        model: fused, on a CUDA device, in fp16 or bf16.
        batch: images of a call.
        size: height and width in pixels, by default the model's own.
    """

    def __init__(self, model: "FusedViT", batch: int, size: tuple[int, int] | None = None) -> None:
        self.model, self.cache = model, GraphCache()  # of all passes: they share a pool, and a library's workspace
        self.height, self.width = size or model.image_size
        self.card, self.torch, self.triton = self.place()
        kind = str(model.dtype).removeprefix("torch.")
        self.label = f"batch {batch} at {self.height} × {self.width} px in {kind} on {self.card}"
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch, model.in_chans, self.height, self.width, generator=generator)
        self.images = images.to(model.device, model.dtype)
        with torch.no_grad():
            exact = copy.deepcopy(model).float()
            self.exact = exact.compute(self.images.float(), Plan(kernels=False))
            plain = model.compute(self.images, Plan(kernels=False))
        self.allowed = 2 * self.error(plain) + torch.finfo(model.dtype).eps / 4

    def place(self) -> tuple[str, str, str]:
        """Return the device's name, and the versions of torch and Triton.

        Raises:
            UsageError: the model is not where its choices matter.
            UnavailableError: there is no Triton.
        """
        if self.model.device.type != "cuda" or self.model.dtype not in HALF:
            raise UsageError(
                f"choices are of models on CUDA in fp16 and bf16; this one is on {self.model.device} in "
                f"{self.model.dtype}: move it, or do without tuning"
            )
        found = tuple(choices._minor(name) for name in ("torch", "triton"))
        if found[1] is None:
            raise UnavailableError("tuning compares Triton's kernels with torch's, and Triton does not import here")
        return torch.cuda.get_device_name(self.model.device), str(found[0]), str(found[1])

    def compute(self, images: Tensor) -> Tensor:
        """Run a pass with the choices in force."""
        return self.model.compute(images)

    def ask(self) -> Sequence[Question]:
        """Return what a pass asks."""
        with choices.asked() as found, torch.no_grad():
            self.compute(self.images)
        return found

    def ready(self) -> GraphPass:
        """Capture a pass."""
        with self.cache.turn(self.images.device):
            return GraphPass(self.cache.capture(self.compute, self.images, self.images), self.judge)

    def judge(self, output: Tensor) -> str | None:
        """Compare an output with fp32's."""
        error = self.error(output)
        if error <= self.allowed:
            return None
        return f"it differs from fp32 by {error:.2g} of its size, {self.allowed:.2g} is allowed"

    def error(self, output: Tensor) -> float:
        """Return the root mean square error of an output, relative to the exact one's size."""
        difference = (output.double() - self.exact.double()).pow(2).mean().sqrt()
        return float(difference / self.exact.double().pow(2).mean().sqrt().clamp(min=1e-12))


class EventTimer:
    """Times passes by CUDA events, each as often as takes about two milliseconds."""

    def __init__(self) -> None:
        self._runs: dict[int, int] = {}

    def __call__(self, passes: Sequence[Callable[[], object]]) -> list[float]:
        """Return the microseconds of one run of each."""
        return [self._one(run) for run in passes]

    def _one(self, run: Callable[[], object]) -> float:
        if id(run) not in self._runs:
            self._runs = {id(run): max(1, min(100, int(_RUNS_US / max(self._time(run, 3), 1.0)))), **self._runs}
        return self._time(run, self._runs[id(run)])

    def _time(self, run: Callable[[], object], runs: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / runs


def tune_model(
    model: "FusedViT",
    batch_sizes: Sequence[int],
    size: tuple[int, int] | None = None,
    *,
    seconds: float = SECONDS,
    timer: Timer | None = None,
) -> list[Tuning]:
    """Tune a model's choices at several batch sizes; its graphs are captured anew afterwards.

    Args:
        model: fused, on a CUDA device, in fp16 or bf16.
        batch_sizes: images of a call.
        size: height and width in pixels, by default the model's own.
        seconds: for all of them; a batch size gets what those before it left.
        timer: of passes, by default the device's events.

    Raises:
        UsageError: the model is not on CUDA or not in half precision.
        DataError: the table cannot be written.
    """
    check_choices()
    found: list[Tuning] = []
    left = seconds
    for i, batch in enumerate(batch_sizes):
        subject = ModelSubject(model, batch, size)
        found.append(tune(subject, timer or EventTimer(), seconds=left / (len(batch_sizes) - i)))
        left -= found[-1].seconds
        if found[-1].stopped:
            break
    model._graph_cache.expire()
    return found
