"""Options of ``vtk export triton``; free of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError
from vtk_export.config import OPSETS

Server = Literal["onnxruntime", "python", "vtk", "tensorrt"]
ONE, MANY = "onnxruntime", "python"
"""Back-ends that are taken for one source and for several."""


@dataclass(frozen=True)
class TritonConfig:
    """Options of ``vtk export triton``."""

    out: Path = field(metadata={"help": "the model repository: the folder that a server is given"})
    sources: tuple[str, ...] = field(
        default=(),
        metadata={"help": "task packs, run folders, merged .safetensors or timm names, each as SOURCE or NAME=SOURCE"},
    )
    backend: Server | None = field(
        default=None,
        metadata={"help": "onnxruntime: a whole copy for each source; python: all packs of one base in one model, on "
                          "onnxruntime and numpy only; vtk: the same in a bank, mixed batches, packs come and go while "
                          "it serves; tensorrt: onnxruntime that builds TensorRT engines in the server; default: "
                          "onnxruntime for one source, python for several"},
    )  # fmt: skip
    name: str | None = field(
        default=None, metadata={"help": "of the model in the server; default: the source's, or `tasks` for several"}
    )
    max_batch_size: int = field(default=32, metadata={"help": "most images that the server puts into one call"})
    static_batch: int | None = field(
        default=None, metadata={"help": "ONNX: a graph of this batch size only, which the server does not batch"}
    )
    max_queue_delay_us: int = field(
        default=500, metadata={"help": "microseconds that a request may wait for others to share a call with"}
    )
    instances: int = field(default=1, metadata={"help": "copies that run side by side, for each GPU where there are"})
    server_device: Literal["auto", "cpu", "gpu"] = field(
        default="auto",
        metadata={"help": "auto: the server's GPUs if it has any; the python back-end has no use for them"},
    )
    server_threads: int | None = field(
        default=None,
        metadata={"help": "CPU threads of each instance; default: what the run time takes, mostly all cores"},
    )
    engine_cache: str = field(
        default="/tmp/vtk-engines", metadata={"help": "tensorrt: folder in the server that keeps the engines it built"}
    )
    warmup: bool = field(
        default=False, metadata={"help": "the server runs a batch of 1 and of the most before it says ready"}
    )
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = field(
        default="auto", metadata={"help": "auto: fp32; of vtk: fp32 on a CPU, bf16 on CUDA"}
    )
    keep_io_types: bool = field(
        default=False, metadata={"help": "ONNX: inputs and outputs stay fp32 whatever the --dtype"}
    )
    opset: int = field(default=18, metadata={"help": "ONNX opset, 18 to 22"})
    fuse: bool | None = field(
        default=None,
        metadata={"help": "ONNX: fold norms and scales, merge branches; default: for models with parallel branches"},
    )
    data: Path | None = field(
        default=None, metadata={"help": "image or folder of images to verify with; default: smoothed random images"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the packs, if they moved"})
    pretrained: bool = field(default=True, metadata={"help": "timm name: take the hub's weights, else random ones"})
    num_classes: int | None = field(default=None, metadata={"help": "timm name: another number of classes"})
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "timm name: pixels, one number or height and width"}
    )
    seed: int = field(default=0, metadata={"help": "of random images, and of random weights of a timm name"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of the verification"})

    @property
    def server(self) -> str:
        """The back-end, the default resolved."""
        return self.backend or (ONE if len(self.sources) == 1 else MANY)

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError("no sources; give packs, run folders, merged .safetensors or timm names")
        if self.opset not in OPSETS:
            raise UsageError(f"`--opset` {self.opset} is not supported; give {OPSETS.start} to {OPSETS.stop - 1}")
        least = {"max_batch_size": 1, "static_batch": 1, "max_queue_delay_us": 0, "instances": 1, "server_threads": 1,
                 "num_classes": 1, "threads": 1}  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"`--{name.replace('_', '-')}` is {value}; give at least {low}")
        if self.server in ("python", "vtk"):
            self._refuse_beyond_onnxruntime()
        if self.server == "tensorrt" and (self.dtype == "bf16" or self.server_device == "cpu"):
            raise UsageError(
                "`--backend tensorrt` is ONNX Runtime with TensorRT on a GPU, in fp32 or fp16 only; leave out "
                f"{'--dtype bf16' if self.dtype == 'bf16' else '--server-device cpu'}, or take --backend onnxruntime"
            )
        if self.keep_io_types and self.dtype in ("auto", "fp32"):
            raise UsageError("`--keep-io-types` is for --dtype fp16 or bf16; an fp32 file has fp32 inputs and outputs")
        if self.name is not None and self.server in ("onnxruntime", "tensorrt") and len(self.sources) > 1:
            raise UsageError(
                f"`--name` {self.name} is of one model, {len(self.sources)} sources make as many; give each NAME=SOURCE"
            )

    def _refuse_beyond_onnxruntime(self) -> None:
        given = {"--static-batch": self.static_batch is not None, "--keep-io-types": self.keep_io_types}
        if self.server == "python":
            given |= {f"--dtype {self.dtype}": self.dtype not in ("auto", "fp32"),
                      "--server-device gpu": self.server_device == "gpu"}  # fmt: skip
        else:
            given |= {f"--opset {self.opset}": self.opset != OPSETS.start, "--fuse": self.fuse is not None}
        if self.server == "vtk" or len(self.sources) > 1:  # packs only, which say these themselves
            given |= {"--no-pretrained": not self.pretrained, "--num-classes": self.num_classes is not None,
                      "--img-size": self.img_size is not None}  # fmt: skip
        for flag, wrong in given.items():
            if wrong:
                raise UsageError(
                    f"`{flag}` is not for --backend {self.server}; leave it out, or take --backend onnxruntime"
                )
