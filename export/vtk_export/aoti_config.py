"""Options of ``vtk export aoti``; free of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError


@dataclass(frozen=True)
class AotiConfig:
    """Options of ``vtk export aoti``."""

    source: str = field(metadata={"help": "task pack, run folder, merged .safetensors, or timm model name"})
    out: Path = field(metadata={"help": "folder for model.pt2 and model.json"})
    dtype: Literal["fp32", "bf16", "fp16"] = field(default="fp32", metadata={"help": "of weights, input and output"})
    device: str = field(
        default="auto", metadata={"help": "auto (CUDA if there is one), cpu, cuda or cuda:N; the file runs there only"}
    )
    fuse: bool | None = field(
        default=None,
        metadata={"help": "fold norms and scales, merge parallel branches; default: wherever the model can be"},
    )
    data: Path | None = field(
        default=None, metadata={"help": "image or folder of images to verify with; default: smoothed random images"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the pack, if they moved"})
    pretrained: bool = field(default=True, metadata={"help": "timm name: take the hub's weights, else random ones"})
    num_classes: int | None = field(default=None, metadata={"help": "timm name: another number of classes"})
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "timm name: pixels, one number or height and width"}
    )
    seed: int = field(default=0, metadata={"help": "of random images, and of random weights of a timm name"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of the verification"})
    profile: tuple[int, ...] = field(
        default=(), metadata={"help": "batch sizes such as 1,8,32: measure the file and leave latency.json beside it"}
    )
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that holds other files too"})

    def __post_init__(self) -> None:
        for name in ("num_classes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`--{name.replace('_', '-')}` is {value}; give at least 1")
        if min(self.profile, default=1) < 1:
            raise UsageError(f"`--profile` {','.join(map(str, self.profile))}: give batch sizes from 1 on")
