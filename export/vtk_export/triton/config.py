"""Options of ``vtk export triton``; free of torch."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.errors import UsageError
from vtk.evaluation.config import check_risk
from vtk.options import Config, Option
from vtk.options.shared import (
    AutoThreshold,
    Base,
    CalibrationImages,
    Fuse,
    ImgSize,
    Int8,
    JudgeImages,
    KeepIoTypes,
    MaxDrop,
    NumClasses,
    Opset,
    Pretrained,
    ProfileSizes,
    Risk,
    Seed,
    Softmax,
    Split,
    StaticBatch,
    Threads,
    Unverified,
    VerifyDataOf,
)
from vtk_export.onnx.config import derive
from vtk_export.openvino.config import OpenvinoConfig
from vtk_export.options import RunTime
from vtk_export.targets import Target, parse_target
from vtk_export.tasks.config import FactorType
from vtk_export.tensor_names import InputName, OutputName, parse_names
from vtk_export.triton.config_checks import check_backend, check_batches, check_target

Server = Literal["onnxruntime", "python", "vtk", "tensorrt", "openvino"]
ONE, MANY = "onnxruntime", "python"
"""Back-ends that are taken for one source and for several."""


@dataclass(frozen=True, kw_only=True)
class TritonConfig(Config):
    """Options of the export to a model repository of Triton Inference Server.

    Raises:
        UsageError: a value is out of range.
    """

    GROUP: ClassVar[str] = "server"

    out: Annotated[Path, Option("model repository of the server", "output", often=True)]
    backend: Annotated[
        Server | None,
        Option("back-end in the server (default: onnxruntime for one source, python for several)", often=True),
    ] = None
    name: Annotated[
        str | None,
        Option("name of the model in the server (default: the source's, or `tasks`)", often=True, nonempty=True),
    ] = None
    update: Annotated[
        bool,
        Option(
            "keep the model's other tasks: the sources are added to them, or replace those of their names",
            "source",
            often=True,
            only_yes=True,
        ),
    ] = False
    remove: Annotated[
        tuple[str, ...],
        Option(
            "remove a task of the model, keep the others",
            "source",
            often=True,
            unique=True,
            flag="remove",
            metavar="TASK",
        ),
    ] = ()
    with_preproc: Annotated[
        bool, Option("take uint8 RGB images; with --ensemble, JPEG and PNG files too", "format", often=True)
    ] = False
    ensemble: Annotated[
        bool | None,
        Option("--with-preproc in a separate step, not in the graph (default: where needed)", "format"),
    ] = None
    softmax: Softmax = False
    threshold: AutoThreshold = None
    risk: Risk = None
    engine: Annotated[
        Path | None, Option("tensorrt: folder of `vtk export tensorrt` with an engine for the server's GPU")
    ] = None
    max_batch_size: Annotated[int, Option("largest batch of the server", often=True, least=1)] = 32
    form: Annotated[
        Literal["auto", "files", "factors"],
        Option(
            "python: a graph per task, or one that takes their factors; auto: factors, if all packs hold them",
            "format",
            often=True,
        ),
    ] = "auto"
    factor_dtype: FactorType = "fp16"
    static_batch: StaticBatch = None
    max_queue_delay_us: Annotated[
        int, Option("longest wait of a request for others to share its batch, in microseconds", least=0)
    ] = 500
    instances: Annotated[int, Option("model instances, per GPU if there are any", often=True, least=1)] = 1
    server_device: Annotated[
        Literal["auto", "cpu", "gpu"], Option("auto: the server's GPUs if it has any; python runs on the CPU")
    ] = "auto"
    python_runtime: Annotated[
        Literal["onnxruntime", "openvino"],
        Option("python: what runs the files; openvino: a whole copy of the weights for each task", often=True),
    ] = "onnxruntime"
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        Option("openvino: precision of products; auto: bf16 where this processor has it, and verifies it", "format"),
    ] = "auto"
    server_threads: Annotated[
        int | None, Option("CPU threads per instance (default: the runtime's, mostly all cores)", least=1)
    ] = None
    engine_cache: Annotated[
        str | None,
        Option("tensorrt: folder in the server for built engines (default: in its /tmp)",
               nonempty=True),
    ] = None  # fmt: skip
    warmup: Annotated[bool, Option("run the smallest and the largest batch before the server reports ready")] = False
    dtype: Annotated[
        Literal["auto", "fp32", "fp16", "bf16"],
        Option("number format; auto: fp32, and bf16 of --backend vtk on CUDA", "format", often=True),
    ] = "auto"
    keep_io_types: KeepIoTypes = False
    int8: Int8 = None
    max_drop: MaxDrop = None
    calibration_images: CalibrationImages = 128
    opset: Opset = 18
    target: RunTime = None
    fuse: Fuse = None
    data: VerifyDataOf = ()
    split: Split = None
    images: JudgeImages = 256
    unverified: Unverified = False
    input_name: InputName = ()
    output_name: OutputName = ()
    profile: ProfileSizes = ()
    seed: Seed = 0
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class TritonCommand(TritonConfig):
    """``vtk export triton``: the sources and the options.

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
        """Return the keyword arguments of `vtk.open_source` for each source, without the seed."""
        return {name: getattr(self, name) for name in ("base", "pretrained", "num_classes", "img_size")}

    @property
    def server(self) -> str:
        """The back-end, the default resolved."""
        return self.backend or (MANY if self.several else ONE)

    @property
    def in_openvino(self) -> bool:
        """Whether OpenVINO runs the files."""
        return self.server == "openvino" or (self.server == "python" and self.python_runtime == "openvino")

    @property
    def changes(self) -> bool:
        """Whether a model that is there is changed, and keeps its other tasks."""
        return self.update or bool(self.remove)

    @property
    def models(self) -> bool:
        """Whether each source is a model of its own."""
        return self.server in ("onnxruntime", "tensorrt", "openvino") and self.form != "factors"

    @property
    def several(self) -> bool:
        """Whether the model is one of several tasks."""
        return self.changes or self.form == "factors" or len(self.sources) > 1

    def onnx_options(self, out: Path, data: Path | None = None, *, with_preproc: bool = False) -> dict[str, Any]:
        """Return the options of an ONNX file that differ from these, for `vtk_export.onnx.config.derive`.

        Args:
            out: its folder.
            data: images of its source.
            with_preproc: preprocessing is in its graph.

        Its inputs and outputs have the toolkit's own names: what writes it for a server that reads it gives it others.
        """
        # the score beside the logits is their softmax, so the model of one task gives both from logits
        softmax = self.softmax and self.server != "python"
        dtype = "fp32" if self.dtype == "auto" else self.dtype
        return {"out": out, "data": data, "dtype": dtype, "softmax": softmax, "with_preproc": with_preproc,
                "input_name": (), "output_name": ()}  # fmt: skip

    def openvino_config(self, out: Path, data: Path | None, **others: Any) -> OpenvinoConfig:
        """Return the options of a file for OpenVINO.

        Args:
            out: its folder.
            data: images of its source.
            others: further options.

        Raises:
            UsageError: as of `OpenvinoConfig`.
        """
        names = {f.name for f in dataclasses.fields(OpenvinoConfig)} & {f.name for f in dataclasses.fields(self)}
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        precision = None if self.precision == "auto" else self.precision
        ours = {"out": out, "data": data, "dtype": "fp32", "precision": precision, "with_preproc": False,
                "softmax": False, "input_name": (), "output_name": (), "profile": ()}  # fmt: skip
        return OpenvinoConfig(**{**values, **ours, **others})

    @property
    def names(self) -> dict[str, str]:
        """Names of the model's inputs and outputs that were given, by the toolkit's own."""
        image, answer = "images" if self.with_preproc else "pixel_values", "probabilities" if self.softmax else "logits"
        return parse_names(self.input_name, self.output_name, image=image, answer=answer)

    @property
    def runtime(self) -> Target | None:
        """What ``target`` names."""
        return None if self.target is None else parse_target(self.target)

    def check(self) -> None:
        """Refuse options that contradict each other, or that the back-end does not take."""
        if not self.sources and not self.remove:
            raise UsageError("no sources; give packs, run folders, merged .safetensors or timm names")
        if self.ensemble is not None and not self.with_preproc:
            flag = "--ensemble" if self.ensemble else "--no-ensemble"
            raise UsageError(f"`{flag}` chooses where --with-preproc runs; add --with-preproc, or leave it out")
        check_risk(self.threshold, self.risk)
        check_backend(self)
        check_target(self)
        check_batches(self)
        self.names  # noqa: B018 - refuses one name for two tensors
        if self.name is not None and self.models and len(self.sources) > 1:
            raise UsageError(
                f"`--name` {self.name} names one model, but {len(self.sources)} sources were given; give NAME=SOURCE"
            )
        if self.engine is not None and len(self.sources) > 1:
            raise UsageError(f"`--engine` {self.engine} belongs to one source, not to {len(self.sources)}; export "
                             "them one by one")  # fmt: skip
        data = Path() if self.data else None
        if self.in_openvino:
            self.openvino_config(Path(), data)  # has its own checks
        elif self.server != "vtk":
            derive(self, **self.onnx_options(Path(), data, with_preproc=self.ensemble is False))  # has its own checks
