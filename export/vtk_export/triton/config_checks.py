"""Checks the options of ``vtk export triton`` against the back-end and the target, and the names of models."""

import re
from typing import TYPE_CHECKING

from vtk.errors import UsageError
from vtk_export.targets import OPSETS, check_caps, tensorrt_of

if TYPE_CHECKING:
    from vtk_export.triton.config import TritonCommand

BANK_PYTHON = (3, 11)
"""Oldest Python that this toolkit runs on."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", re.ASCII)
_BANK = "a bank runs packs in torch, without a graph"
_SEVERAL = "several packs share their weights in fp32"
_CPU = "it runs on the CPU, where ONNX Runtime has no arithmetic in 16 bits"
_PACKS = "the model is that of the packs"
_JOINS = "it joins the requests of its tasks"
_FORMS = "a form is one of ONNX files, in the back-ends python and onnxruntime"

Reasons = dict[str, object]
"""Flag to the reason why a back-end does not take it; False, None or "" where the flag was not given."""


def check_name(name: str) -> str:
    """Return a model's name, or refuse it: it is a folder's name, and a part of URLs and of the config.

    Raises:
        UsageError: names what is allowed.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid model name; use up to 64 of A-Z a-z 0-9 . _ - with a "
                         "letter or digit at both ends: --name NAME")  # fmt: skip
    return name


def check_batches(config: "TritonCommand") -> None:
    """Refuse a graph whose outputs depend on the images that share its calls, where calls have several.

    Raises:
        UsageError: names what to use instead.
    """
    most = config.max_batch_size if config.static_batch is None else config.static_batch
    if config.int8 == "dynamic" and most > 1:
        size = f"--max-batch-size {most}" if config.static_batch is None else f"--static-batch {most}"
        raise UsageError(
            f"`--int8 dynamic` finds its ranges over all images of a call, so with {size} one client's images "
            "would change another's answers; give --int8 static --data FOLDER, or --max-batch-size 1"
        )


def check_backend(config: "TritonCommand") -> None:
    """Refuse what the back-end does not do.

    Raises:
        UsageError: names the first such flag and the reason.
    """
    reasons = {"python": _python, "vtk": _vtk, "tensorrt": _tensorrt, "onnxruntime": _onnxruntime,
               "openvino": _openvino}  # fmt: skip
    why = reasons[config.server](config)
    if config.python_runtime != "onnxruntime" and config.server != "python":
        raise UsageError(f"`--python-runtime` {config.python_runtime} is for --backend python; `--backend` is "
                         f"{config.server}: leave one out")  # fmt: skip
    if config.in_openvino:
        why |= _in_openvino(config)
    elif config.precision != "auto":
        raise UsageError(f"`--precision` {config.precision} is OpenVINO's; give --backend python --python-runtime "
                         "openvino, or --dtype")  # fmt: skip
    if config.server not in ("onnxruntime", "openvino") and config.ensemble is False:
        why["--no-ensemble"] = "its graph takes normalised tensors"
    in_graph = config.server in ("onnxruntime", "openvino") and not config.ensemble
    if config.changes and config.models:
        flag = "--update" if config.update else "--remove"
        raise UsageError(f"`{flag}` changes the tasks of one model, and --backend {config.server} has a model for "
                         "each; export or delete that, or use --backend vtk")  # fmt: skip
    if config.static_batch is not None and config.with_preproc and not in_graph:
        raise UsageError("`--static-batch` fixes the size of a call, and an ensemble takes requests of any size; leave "
                         "it out, or give --no-ensemble")  # fmt: skip
    if config.server not in ("onnxruntime", "openvino") or config.form == "factors":
        why["--threshold"] = config.threshold and "its graph has no such output, and clients can compare the scores"
    if config.server == "vtk" or (config.server == "python" and config.several):
        why |= {
            "--no-pretrained": not config.pretrained and _PACKS, "--num-classes": config.num_classes and _PACKS,
            "--img-size": config.img_size and _PACKS,
        }  # fmt: skip
    for flag, reason in _factors(config).items():
        if reason:
            raise UsageError(f"`{flag}` is not for --form {config.form}: {reason}; leave it out")
    for flag, reason in why.items():
        if reason:
            other = "tensorrt" if flag == "--engine" else "onnxruntime"
            raise UsageError(f"`{flag}` is not for --backend {config.server}: {reason}; leave it out, or use "
                             f"--backend {other}")  # fmt: skip


def check_target(config: "TritonCommand") -> None:
    """Refuse a runtime that is not the back-end's, and a server that cannot run it.

    Raises:
        UsageError: names what to give instead.
    """
    target = config.runtime
    if target is None:
        return
    kinds = {"onnxruntime": ("ort",), "python": ("ort",), "tensorrt": ("trt",), "vtk": (), "openvino": ()}[
        config.server
    ]
    if target.release is None and target.kind not in kinds:
        known = " or ".join(("tritonserver:YY.MM", *(f"{kind}:X.Y" for kind in kinds)))
        raise UsageError(f"`--target` {target.text} does not run --backend {config.server}; give {known}")
    if config.server == "tensorrt" and config.engine is None:
        check_caps(tensorrt_of(target), config.opset, None)
    elif config.server == "vtk":
        release = target.release
        if release is not None and release.python < BANK_PYTHON:
            raise UsageError(f"`--target` {target.text} has Python {_dotted(release.python)}, and --backend vtk "
                             f"needs {_dotted(BANK_PYTHON)}; give a newer one")  # fmt: skip
    elif config.server == "onnxruntime":
        check_caps(target, config.opset, None)


def _onnxruntime(config: "TritonCommand") -> Reasons:
    return {"--engine": config.engine and "it runs ONNX files"}


def _factors(config: "TritonCommand") -> Reasons:
    """Return the flags that do not go with one graph of factors for all tasks."""
    changes = config.form == "auto" and config.changes and config.server == "python"  # of a model that takes factors
    if config.form == "auto" and not changes:
        return {}
    why: Reasons = {f"--backend {config.server}": config.server not in ("python", "onnxruntime") and _FORMS}
    if config.form == "factors" or changes:
        why |= {
            "--profile": bool(config.profile) and "it measures files that take images alone",
            "--fuse": bool(config.fuse) and "weights of many tasks cannot be folded",
            "--unverified": config.unverified and "its graph is always verified",
            f"--int8 {config.int8}": config.int8 and _SEVERAL,
            f"--dtype {config.dtype}": config.dtype not in ("auto", "fp32") and _SEVERAL,
            "--keep-io-types": config.keep_io_types and "its inputs and outputs are fp32 anyway",
            "--static-batch": config.static_batch and _JOINS,
        }
        if config.server == "onnxruntime":
            why |= {
                "--softmax": config.softmax and "its tasks have different numbers of classes",
                "--with-preproc": config.with_preproc and "the preprocessing step knows tasks by name, not by number",
            }
    return why


def _python(config: "TritonCommand") -> Reasons:
    several = config.several
    return {
        "--static-batch": config.static_batch and _JOINS,
        "--keep-io-types": config.keep_io_types and "its inputs and outputs are fp32 anyway",
        f"--dtype {config.dtype}": config.dtype not in ("auto", "fp32") and _CPU,
        "--server-device gpu": config.server_device == "gpu" and "it runs on the CPU",
        f"--int8 {config.int8}": config.int8 and several and _SEVERAL,
        "--engine": config.engine and "it runs ONNX files",
    }


def _vtk(config: "TritonCommand") -> Reasons:
    return {
        "--static-batch": config.static_batch and _BANK, "--keep-io-types": config.keep_io_types and _BANK,
        f"--opset {config.opset}": config.opset != OPSETS.start and _BANK, "--fuse": config.fuse is not None and _BANK,
        f"--int8 {config.int8}": config.int8 and _BANK, "--max-drop": config.max_drop is not None and _BANK,
        "--profile": bool(config.profile) and f"{_BANK}, and `vtk profile PACK --backends bank` measures it",
        "--engine": config.engine and _BANK, "--unverified": config.unverified and _BANK,
    }  # fmt: skip


def _openvino(config: "TritonCommand") -> Reasons:
    """Return what the server's OpenVINO back-end does not do."""
    return {
        "--ensemble": bool(config.ensemble) and "its file prepares images itself",
        "--server-device gpu": config.server_device == "gpu" and "it runs on the CPU",
    }


def _in_openvino(config: "TritonCommand") -> Reasons:
    """Return the flags that do not go with files of OpenVINO."""
    ir = "its files are OpenVINO's"
    return {
        "--engine": config.engine and ir, "--keep-io-types": config.keep_io_types and ir,
        f"--opset {config.opset}": config.opset != OPSETS.start and ir, "--profile": bool(config.profile) and ir,
        "--unverified": config.unverified and "its files are always verified",
        f"--dtype {config.dtype}": config.dtype not in ("auto", "fp32") and "--precision rounds products to bf16",
        "--int8 dynamic": config.int8 == "dynamic" and "it runs static int8 alone",
        f"--form {config.form}": config.form == "factors" and "its graph takes no factors",
        "--update": config.changes and "it keeps no packs to change",
    }  # fmt: skip


def _tensorrt(config: "TritonCommand") -> Reasons:
    gpu = "it is TensorRT on a GPU"
    why: Reasons = {
        "--server-device cpu": config.server_device == "cpu" and gpu,
        f"--int8 {config.int8}": config.int8 and "its engines are fp32, fp16 or, built beforehand, bf16",
        "--softmax": config.softmax and "its graph ends with the logits",
    }
    if config.engine is None:
        return why | {"--dtype bf16": config.dtype == "bf16" and f"{gpu} in fp32 or fp16; build an --engine for bf16"}
    built = "an --engine has been built"
    return why | {
        f"--dtype {config.dtype}": config.dtype != "auto" and built,
        "--keep-io-types": config.keep_io_types and built, "--static-batch": config.static_batch and built,
        "--fuse": config.fuse is not None and built, f"--opset {config.opset}": config.opset != OPSETS.start and built,
        "--profile": bool(config.profile) and built,
        "--input-name": bool(config.input_name) and f"{built} with names", "--output-name": bool(config.output_name) and
        f"{built} with names",
    }  # fmt: skip


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
