"""Options of ``vtk export triton``; free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import (
    Base,
    CalibrationImages,
    Fuse,
    ImgSize,
    Int8,
    JudgeImages,
    KeepIoTypes,
    NumClasses,
    Opset,
    Pretrained,
    ProfileSizes,
    Seed,
    Softmax,
    Split,
    StaticBatch,
    Threads,
    Unverified,
    VerifyDataOf,
)
from vtk_export.config import RunTime
from vtk_export.onnx.config import OnnxConfig
from vtk_export.targets import OPSETS, Target, check_caps, parse_target, tensorrt_of

Server = Literal["onnxruntime", "python", "vtk", "tensorrt"]
ONE, MANY = "onnxruntime", "python"
"""Back-ends that are taken for one source and for several."""

BANK_PYTHON = (3, 11)
"""Oldest Python that this toolkit runs on."""

_BANK = "a bank runs packs in torch, without a graph"
_SEVERAL = "several packs share their weights in fp32"
_CPU = "it runs on the CPU, where ONNX Runtime has no arithmetic in 16 bits"


@dataclass(frozen=True, kw_only=True)
class TritonConfig(Config):
    """What a Triton Inference Server is to serve, and how.

    Raises:
        UsageError: a value is out of range.
    """

    GROUP: ClassVar[str] = "server"

    out: Annotated[Path, Option("model repository: the folder that a server is given", "output", often=True)]
    backend: Annotated[
        Server | None,
        Option("what runs in the server (default: onnxruntime for one source, python for several)", often=True),
    ] = None
    name: Annotated[
        str | None,
        Option("name of the model in the server (default: the source's, or `tasks`)", often=True, nonempty=True),
    ] = None
    with_preproc: Annotated[
        bool, Option("take uint8 RGB images; with --ensemble, JPEG and PNG files too", "format", often=True)
    ] = False
    ensemble: Annotated[
        bool | None,
        Option("--with-preproc by a step of its own, or in the graph (default: where possible)", "format"),
    ] = None
    softmax: Softmax = False
    engine: Annotated[
        Path | None, Option("tensorrt: folder of `vtk export tensorrt` with an engine for the server's GPU")
    ] = None
    max_batch_size: Annotated[int, Option("most images that the server puts into one call", often=True, least=1)] = 32
    static_batch: StaticBatch = None
    max_queue_delay_us: Annotated[
        int, Option("microseconds that a request may wait for others to share a call", least=0)
    ] = 500
    instances: Annotated[
        int, Option("copies that run side by side, on each GPU if there are any", often=True, least=1)
    ] = 1
    server_device: Annotated[
        Literal["auto", "cpu", "gpu"], Option("auto: the server's GPUs if it has any; python runs on the CPU")
    ] = "auto"
    server_threads: Annotated[
        int | None, Option("CPU threads of each instance (default: the runtime's, mostly all cores)", least=1)
    ] = None
    engine_cache: Annotated[
        str | None,
        Option("tensorrt: a folder that the server has, for one of each model's engines (default: in its /tmp)",
               nonempty=True),
    ] = None  # fmt: skip
    warmup: Annotated[bool, Option("run the smallest and the largest batch before the server says ready")] = False
    dtype: Annotated[
        Literal["auto", "fp32", "fp16", "bf16"],
        Option("number format; auto: fp32, and bf16 of --backend vtk on CUDA", "format", often=True),
    ] = "auto"
    keep_io_types: KeepIoTypes = False
    int8: Int8 = None
    calibration_images: CalibrationImages = 128
    opset: Opset = 18
    target: RunTime = None
    fuse: Fuse = None
    data: VerifyDataOf = ()
    split: Split = None
    images: JudgeImages = 256
    unverified: Unverified = False
    profile: ProfileSizes = ()
    seed: Seed = 0
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class TritonCommand(TritonConfig):
    """``vtk export triton``: what to open, and what to make of it.

    Raises:
        UsageError: a value is out of range, contradicts another, or is not for the back-end.
    """

    sources: Annotated[
        tuple[str, ...],
        Option("packs, run folders, merged .safetensors or timm names, each SOURCE or NAME=SOURCE", "source",
               often=True),
    ] = ()  # fmt: skip
    base: Base = None
    pretrained: Pretrained = True
    num_classes: NumClasses = None
    img_size: ImgSize = None

    def opening(self) -> dict[str, Any]:
        """Return what `vtk.open_source` is told beside each source; the seed is an option of its own."""
        return {name: getattr(self, name) for name in ("base", "pretrained", "num_classes", "img_size")}

    @property
    def server(self) -> str:
        """The back-end, the default resolved."""
        return self.backend or (ONE if len(self.sources) == 1 else MANY)

    def onnx_config(self, out: Path, data: Path | None = None, *, with_preproc: bool = False) -> OnnxConfig:
        """Return the options of an ONNX file.

        Args:
            out: its folder.
            data: images of its source.
            with_preproc: whether its graph prepares images.
        """
        # the score beside the logits is their softmax, so the model of one task gives both from logits
        softmax = self.softmax and self.server != "python"
        return OnnxConfig(
            out=out, opset=self.opset, static_batch=self.static_batch, data=data, split=self.split, fuse=self.fuse,
            dtype="fp32" if self.dtype == "auto" else self.dtype, keep_io_types=self.keep_io_types, int8=self.int8,
            calibration_images=self.calibration_images, images=self.images, unverified=self.unverified,
            softmax=softmax, with_preproc=with_preproc, profile=self.profile, seed=self.seed, threads=self.threads,
            target=self.target,
        )  # fmt: skip

    @property
    def runtime(self) -> Target | None:
        """What ``target`` names."""
        return None if self.target is None else parse_target(self.target)

    def check(self) -> None:
        """Refuse options that contradict each other, or that the back-end does not take."""
        if not self.sources:
            raise UsageError("no sources; give packs, run folders, merged .safetensors or timm names")
        if self.ensemble is not None and not self.with_preproc:
            flag = "--ensemble" if self.ensemble else "--no-ensemble"
            raise UsageError(f"`{flag}` says where --with-preproc is done; add that, or leave it out")
        self._refuse()
        self._check_target()
        self._check_batches()
        if self.name is not None and self.server in ("onnxruntime", "tensorrt") and len(self.sources) > 1:
            raise UsageError(
                f"`--name` {self.name} is of one model, {len(self.sources)} sources make as many; give each NAME=SOURCE"
            )
        if self.engine is not None and len(self.sources) > 1:
            raise UsageError(f"`--engine` {self.engine} is of one source, {len(self.sources)} were given; export them "
                             "one by one")  # fmt: skip
        if self.server != "vtk":
            data = Path() if self.data else None
            self.onnx_config(Path(), data, with_preproc=self.ensemble is False)  # has its own checks

    def _check_batches(self) -> None:
        """Refuse a graph whose answers depend on the images that share its calls, where calls have several."""
        most = self.max_batch_size if self.static_batch is None else self.static_batch
        if self.int8 == "dynamic" and most > 1:
            size = f"--max-batch-size {most}" if self.static_batch is None else f"--static-batch {most}"
            raise UsageError(
                f"`--int8 dynamic` finds its ranges over all images of a call, so with {size} one client's images "
                "would change another's answers; give --int8 static --data FOLDER, or --max-batch-size 1"
            )

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

    def _check_target(self) -> None:
        """Refuse a run time that is not the back-end's, and a server that cannot run it."""
        target = self.runtime
        if target is None:
            return
        kinds = {"onnxruntime": ("ort",), "python": ("ort",), "tensorrt": ("trt",), "vtk": ()}[self.server]
        if target.release is None and target.kind not in kinds:
            known = " or ".join(("tritonserver:YY.MM", *(f"{kind}:X.Y" for kind in kinds)))
            raise UsageError(f"`--target` {target.text} does not run --backend {self.server}; give {known}")
        if self.server == "tensorrt" and self.engine is None:
            check_caps(tensorrt_of(target), self.opset, None)
        elif self.server == "vtk":
            release = target.release
            if release is not None and release.python < BANK_PYTHON:
                raise UsageError(f"`--target` {target.text} has Python {_dotted(release.python)}, and --backend vtk "
                                 f"needs {_dotted(BANK_PYTHON)}; give a newer one")  # fmt: skip
        elif self.server == "onnxruntime":
            check_caps(target, self.opset, None)

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


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
