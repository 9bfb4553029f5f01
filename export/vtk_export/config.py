"""Options of the exporters; free of torch."""

from dataclasses import dataclass, field
from pathlib import Path

from vtk.errors import UsageError

OPSETS = range(18, 23)
"""Opsets of the standard ONNX domain that torch's exporter writes and that are tested here."""


@dataclass(frozen=True)
class OnnxConfig:
    """Options of ``vtk export onnx``."""

    source: str = field(metadata={"help": "task pack, run folder, merged .safetensors, or timm model name"})
    out: Path = field(metadata={"help": "folder for model.onnx and model.json"})
    opset: int = field(default=18, metadata={"help": "ONNX opset, 18 to 22"})
    static_batch: int | None = field(default=None, metadata={"help": "fixed batch size; default: any batch size"})
    data: Path | None = field(
        default=None, metadata={"help": "image or folder of images to verify with; default: smoothed random images"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the pack, if they moved"})
    pretrained: bool = field(default=True, metadata={"help": "timm name: take the hub's weights, else random ones"})
    num_classes: int | None = field(default=None, metadata={"help": "timm name: another number of classes"})
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "timm name: pixels, one number or height and width"}
    )
    fuse: bool | None = field(
        default=None,
        metadata={"help": "fold norms and scales, merge parallel branches; default: for models with parallel branches"},
    )
    seed: int = field(default=0, metadata={"help": "of random images, and of random weights of a timm name"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of the verification"})
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that holds other files too"})

    def __post_init__(self) -> None:
        if self.opset not in OPSETS:
            raise UsageError(f"`--opset` {self.opset} is not supported; give {OPSETS.start} to {OPSETS.stop - 1}")
        if self.static_batch is not None and self.static_batch < 1:
            raise UsageError(f"`--static-batch` is {self.static_batch}; give at least 1, or leave it out for any batch")
        if self.num_classes is not None and self.num_classes < 1:
            raise UsageError(f"`--num-classes` is {self.num_classes}; give at least 1")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"`--threads` is {self.threads}; give at least 1")
