"""Options of ``vtk export triton``; free of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError
from vtk_export.config import OPSETS, OnnxConfig

Server = Literal["onnxruntime", "python", "vtk", "tensorrt"]
ONE, MANY = "onnxruntime", "python"
"""Back-ends that are taken for one source and for several."""

_BANK = "a bank runs packs in torch, without a graph"
_SEVERAL = "several packs share their weights in fp32"
_CPU = "it runs on the CPU, where ONNX Runtime has no arithmetic in 16 bits"


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
                          "it serves; tensorrt: onnxruntime that builds TensorRT engines in the server, or --engine; "
                          "default: onnxruntime for one source, python for several"},
    )  # fmt: skip
    name: str | None = field(
        default=None, metadata={"help": "of the model in the server; default: the source's, or `tasks` for several"}
    )
    with_preproc: bool = field(
        default=False,
        metadata={"help": "take images, not normalised tensors: uint8 RGB, prepared in the graph; or, with --ensemble "
                          "and where the graph cannot, also JPEG and PNG files, prepared by a step before the model"},
    )  # fmt: skip
    ensemble: bool | None = field(
        default=None,
        metadata={"help": "--with-preproc by a step of numpy and Pillow before the model (--ensemble), or by nodes of "
                          "its graph (--no-ensemble); default: the graph, where back-end and resize mode allow it"},
    )  # fmt: skip
    softmax: bool = field(default=False, metadata={"help": "give `probabilities` instead of `logits`"})
    engine: Path | None = field(
        default=None,
        metadata={"help": "tensorrt: folder of `vtk export tensorrt` with an engine built for the server's GPU"},
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
    int8: Literal["dynamic", "static"] | None = field(
        default=None,
        metadata={"help": "onnxruntime, or python with one source: dynamic for CPU servers, static (QDQ) calibrated on "
                          "--data"},
    )  # fmt: skip
    calibration_images: int = field(default=128, metadata={"help": "--int8 static: images of --data to calibrate on"})
    opset: int = field(default=18, metadata={"help": "ONNX opset, 18 to 22"})
    fuse: bool | None = field(
        default=None,
        metadata={"help": "ONNX: fold norms and scales, merge branches; default: as vtk export onnx and tasks do"},
    )
    data: Path | None = field(
        default=None, metadata={"help": "image or folder of images to verify with; default: smoothed random images"}
    )
    images: int = field(default=256, metadata={"help": "images of --data that fp16, bf16 and int8 files are judged on"})
    unverified: bool = field(
        default=False, metadata={"help": "keep a file that nothing here can run (bf16 without a GPU); it says so"}
    )
    profile: tuple[int, ...] = field(
        default=(), metadata={"help": "batch sizes such as 1,8,32: measure the graph and leave latency.json beside it"}
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

    def onnx_config(self, source: str, out: Path, *, with_preproc: bool = False) -> OnnxConfig:
        """Return the options of an ONNX file.

        Args:
            source: what it is made of.
            out: its folder.
            with_preproc: whether its graph prepares images.
        """
        # the score beside the logits is their softmax, so the model of one task gives both from logits
        softmax = self.softmax and self.server != "python"
        return OnnxConfig(
            source, out, opset=self.opset, static_batch=self.static_batch, data=self.data, fuse=self.fuse,
            dtype="fp32" if self.dtype == "auto" else self.dtype, keep_io_types=self.keep_io_types, int8=self.int8,
            calibration_images=self.calibration_images, images=self.images, unverified=self.unverified,
            softmax=softmax, with_preproc=with_preproc, profile=self.profile, seed=self.seed, threads=self.threads,
        )  # fmt: skip

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
        if self.ensemble is not None and not self.with_preproc:
            flag = "--ensemble" if self.ensemble else "--no-ensemble"
            raise UsageError(f"`{flag}` says where --with-preproc is done; add that, or leave it out")
        self._refuse()
        if self.name is not None and self.server in ("onnxruntime", "tensorrt") and len(self.sources) > 1:
            raise UsageError(
                f"`--name` {self.name} is of one model, {len(self.sources)} sources make as many; give each NAME=SOURCE"
            )
        if self.engine is not None and len(self.sources) > 1:
            raise UsageError(f"`--engine` {self.engine} is of one source, {len(self.sources)} were given; export them "
                             "one by one")  # fmt: skip
        if self.server != "vtk":
            self.onnx_config(self.sources[0], Path(), with_preproc=self.ensemble is False)  # has its own checks

    def _refuse(self) -> None:
        """Refuse what the back-end does not do, with the reason."""
        reasons = {"python": self._python, "vtk": self._vtk, "tensorrt": self._tensorrt}
        onnx: dict[str, object] = {"--engine": self.engine and "it runs ONNX files"}
        why = reasons[self.server]() if self.server in reasons else onnx
        if self.server != "onnxruntime" and self.ensemble is False:
            why["--no-ensemble"] = "its graph takes normalised tensors"
        if self.static_batch is not None and self.with_preproc and (self.server != "onnxruntime" or self.ensemble):
            raise UsageError("`--static-batch` is of one call, and an ensemble passes on what a request holds; leave "
                             "it out, or give --no-ensemble")  # fmt: skip
        if self.server == "vtk" or (self.server == "python" and len(self.sources) > 1):  # packs, which say these
            why |= {"--no-pretrained": not self.pretrained and "it is of packs", "--num-classes": self.num_classes and
                    "it is of packs", "--img-size": self.img_size and "it is of packs"}  # fmt: skip
        for flag, reason in why.items():
            if reason:
                other = "tensorrt" if flag == "--engine" else "onnxruntime"
                raise UsageError(f"`{flag}` is not for --backend {self.server}: {reason}; leave it out, or take "
                                 f"--backend {other}")  # fmt: skip

    def _python(self) -> dict[str, object]:
        several = len(self.sources) > 1
        return {
            "--static-batch": self.static_batch and "it joins the requests of its tasks",
            "--keep-io-types": self.keep_io_types and "its inputs and outputs are fp32 anyway",
            f"--dtype {self.dtype}": self.dtype not in ("auto", "fp32") and _CPU,
            "--server-device gpu": self.server_device == "gpu" and "it runs on the CPU",
            f"--int8 {self.int8}": self.int8 and several and _SEVERAL,
            "--engine": self.engine and "it runs ONNX files",
        }

    def _vtk(self) -> dict[str, object]:
        return {
            "--static-batch": self.static_batch and _BANK, "--keep-io-types": self.keep_io_types and _BANK,
            f"--opset {self.opset}": self.opset != OPSETS.start and _BANK, "--fuse": self.fuse is not None and _BANK,
            f"--int8 {self.int8}": self.int8 and _BANK,
            "--profile": bool(self.profile) and f"{_BANK}, and `vtk profile PACK --backends bank` measures it",
            "--engine": self.engine and _BANK, "--unverified": self.unverified and _BANK,
        }  # fmt: skip

    def _tensorrt(self) -> dict[str, object]:
        gpu = "it is TensorRT on a GPU"
        why: dict[str, object] = {
            "--server-device cpu": self.server_device == "cpu" and gpu,
            f"--int8 {self.int8}": self.int8 and "its engines are fp32, fp16 or, built beforehand, bf16",
            "--softmax": self.softmax and "its graph ends with the logits",
        }
        if self.engine is None:
            return why | {"--dtype bf16": self.dtype == "bf16" and f"{gpu} in fp32 or fp16; build an --engine for bf16"}
        built = "an --engine has been built"
        return why | {
            f"--dtype {self.dtype}": self.dtype != "auto" and built, "--keep-io-types": self.keep_io_types and built,
            "--static-batch": self.static_batch and built, "--fuse": self.fuse is not None and built,
            f"--opset {self.opset}": self.opset != OPSETS.start and built, "--profile": bool(self.profile) and built,
        }  # fmt: skip
