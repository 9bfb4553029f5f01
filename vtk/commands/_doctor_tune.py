"""``vtk doctor --tune``: measures the fastest implementations on this GPU for the given models."""

import dataclasses
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from vtk import console
from vtk.errors import StoppedError, UnavailableError, UsageError
from vtk.options import Config, Option

if TYPE_CHECKING:
    from vtk.fused.tuning_result import Tuning
    from vtk.runtime.source import Source

MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
MOST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Config):
    """Options of ``vtk doctor``.

    Raises:
        UsageError: models without ``tune``, or a value out of range.
    """

    GROUP: ClassVar[str] = "tune"

    models: Annotated[
        tuple[str, ...],
        Option(f"--tune: packs or timm names (default: {', '.join(MODELS)})", often=True, metavar="MODEL", unique=True),
    ] = ()
    tune: Annotated[
        bool, Option("measure the fastest implementations on the CUDA GPU, and store the choice", often=True,
                     only_yes=True)
    ] = False  # fmt: skip
    batch_sizes: Annotated[
        tuple[int, ...], Option("images per call", often=True, least=1, unique=True, nonempty=True)
    ] = (1, 8, 64)
    dtype: Annotated[Literal["bf16", "fp16"], Option("precision of the models", often=True)] = "bf16"
    device: Annotated[
        str, Option("cuda or cuda:N", often=True, convert=str, pattern=r"cuda(:\d+)?", allowed="cuda or cuda:N")
    ] = "cuda"
    seconds: Annotated[
        float, Option("maximum time for all models and batch sizes together", often=True, above=0, most=MOST_SECONDS)
    ] = MOST_SECONDS

    def check(self) -> None:
        """Refuse models and options that only --tune uses."""
        if self.models and not self.tune:
            raise UsageError(f"`vtk doctor {' '.join(self.models)}` names models, which only --tune uses; add --tune")
        for f in dataclasses.fields(self):
            if not self.tune and f.name not in ("models", "tune") and getattr(self, f.name) != f.default:
                raise UsageError(f"`--{f.name.replace('_', '-')}` only works with --tune; add that, or leave it out")


def run(config: DoctorConfig) -> int:
    """Tune, print a line for each model and batch size, and where the choices are stored.

    Raises:
        UnavailableError: there is no CUDA device.
        StoppedError: Ctrl-C; what was measured is kept.
    """
    import torch

    from vtk.models.devices import resolve_device

    if not torch.cuda.is_available():
        raise UnavailableError("`--tune` needs a CUDA device, and torch sees none; leave it out")
    device = resolve_device(config.device)
    end = time.monotonic() + config.seconds
    found: list[Tuning] = []
    sources = [_open(name) for name in config.models or MODELS]  # a wrong name is an error before anything is measured
    for i, source in enumerate(sources):
        found += _one(source, config, device, (end - time.monotonic()) / (len(sources) - i))
        if found and found[-1].stopped:
            kept = sum(tuning.measured for tuning in found)
            raise StoppedError(f"stopped; {kept} measured choices are kept in {found[-1].path}", signal.SIGINT)
    console.emit_json({"tuned": [_plain(tuning) for tuning in found]})
    return 0


def _open(name: str) -> "Source":
    from vtk.runtime.opening import open_source

    source = open_source(name)
    # random weights are as fast; other errors are raised by the first call
    return open_source(name, pretrained=False) if source.kind == "timm" else source


def _one(source: "Source", config: DoctorConfig, device: Any, seconds: float) -> "Sequence[Tuning]":
    import torch

    from vtk.fused import fuse
    from vtk.fused.tuning_card import tune_model
    from vtk.models.devices import resolve_dtype

    model = source.model()
    with torch.cuda.device(device):
        fused = fuse(model, resolve_dtype(config.dtype), keep_source=False).to(device)
        found = tune_model(fused, config.batch_sizes, seconds=seconds)
    for tuning in found:
        console.say(f"{source.name}, {tuning}")
        for text in tuning.left_out:
            console.say(f"  not timed: {text}", style="dim")
    return found


def _plain(tuning: "Tuning") -> dict[str, Any]:
    changed = [
        {**question._asdict(), "dtype": str(question.dtype).removeprefix("torch."), "before": old, "after": new}
        for question, (old, new) in tuning.changed.items()
    ]
    return {**{f.name: getattr(tuning, f.name) for f in dataclasses.fields(tuning)}, "changed": changed}
