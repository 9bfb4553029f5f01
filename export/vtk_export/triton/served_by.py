"""Chooses the server image and the Python packages that a model needs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx

from vtk import console
from vtk.errors import UsageError
from vtk_export.runtime_versions import Release
from vtk_export.targets import Target, oldest, same_version, server_for, takes, tensorrt_of
from vtk_export.triton.config_checks import BANK_PYTHON

OPENVINO = "2025.2"
"""Oldest release of OpenVINO, as in the extra of that name."""

UNKNOWN = "nvcr.io/nvidia/tritonserver:YY.MM-py3"
"""Placeholder where no known image can run a model."""


@dataclass(frozen=True)
class Server:
    """A server release, and packages for its Python.

    Attributes:
        release: None where no known one can run the model.
        packages: for its Python back-end, as pip takes them.
    """

    release: Release | None
    packages: tuple[str, ...] = ()

    @property
    def image(self) -> str:
        """Name of the container's image."""
        return UNKNOWN if self.release is None else self.release.image


def serve_graph(path: Path, target: Target | None, *, tensorrt: bool = False) -> Server:
    """Return the server for an ONNX file.

    Args:
        path: the file.
        target: that was asked for.
        tensorrt: its ONNX Runtime hands the graph to TensorRT.

    Raises:
        UsageError: the server that was asked for does not take the file.
    """
    opset, ir_version = read_versions([path])
    if target is not None and target.release is not None:
        if not takes(target.release, opset=opset, ir_version=ir_version, runs_tensorrt=tensorrt):
            raise UsageError(f"`--target` {target.text} does not take opset {opset} and IR {ir_version}; give a newer "
                             "one, or a lower --opset")  # fmt: skip
        return Server(target.release)
    wanted = target.version if target is not None and target.kind == "trt" and tensorrt else ""
    exact = server_for(opset=opset, ir_version=ir_version, tensorrt=wanted, runs_tensorrt=True) if wanted else None
    return _known(exact or server_for(opset=opset, ir_version=ir_version, runs_tensorrt=tensorrt),
                  f"opset {opset} and IR {ir_version}")  # fmt: skip


def serve_engine(built: str, target: Target | None) -> Server:
    """Return the server for an engine of a TensorRT version.

    Raises:
        UsageError: what was asked for has another TensorRT.
    """
    right = server_for(tensorrt=built)
    if target is None:
        return _known(right, f"TensorRT {built}")
    has = tensorrt_of(target).version
    if not same_version(has, built):
        other = f"give --target tritonserver:{right.month}" if right else "leave --target out"
        raise UsageError(f"`--target` {target.text} has TensorRT {has}, the engine was built with {built}; build it "
                         f"with that version, or {other}")  # fmt: skip
    return _known(target.release or right, f"TensorRT {built}")


def serve_python(files: Iterable[Path], target: Target | None) -> Server:
    """Return the server for ONNX files that its Python back-end opens with an onnxruntime from pip."""
    opset, ir_version = read_versions(files)
    least = oldest(opset, ir_version)["ort"]
    return Server((target and target.release) or server_for(), (f"onnxruntime>={least}",))


def serve_openvino(target: Target | None) -> Server:
    """Return the server for files that its Python back-end opens with an openvino from pip."""
    return Server((target and target.release) or server_for(), (f"openvino>={OPENVINO}",))


def serve_bank(target: Target | None) -> Server:
    """Return the server for a bank, which runs this toolkit."""
    return Server((target and target.release) or server_for(python=BANK_PYTHON), ("vit-toolkit",))


def read_versions(files: Iterable[Path]) -> tuple[int, int]:
    """Return the highest opset and IR version of ONNX files."""
    protos = [onnx.load(path, load_external_data=False) for path in files]
    opsets = [entry.version for proto in protos for entry in proto.opset_import if entry.domain in ("", "ai.onnx")]
    return max(opsets), max(proto.ir_version for proto in protos)


def _known(release: Release | None, what: str) -> Server:
    if release is None:
        console.warn(f"no known server release has {re.sub(' +', ' ', what)}: find one in NVIDIA's Frameworks Support "
                     "Matrix, and replace YY.MM by it")  # fmt: skip
    return Server(release)
