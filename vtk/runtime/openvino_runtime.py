"""Compiles ONNX and IR files with OpenVINO for the CPU, with explicit settings, and keeps what was compiled.

OpenVINO chooses precision, threads and pinning by the machine it runs on; here all of them are given, so that the same
flags mean the same on two machines. A compiled model is kept under the toolkit's home by the content of its files, the
settings, OpenVINO's version and the processor.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, Literal

from vtk.errors import DataError, UnavailableError, UsageError
from vtk.files import home, replace_file, sweep
from vtk.packages import importing, require
from vtk.runtime.openvino_resize import antialias

Precision = Literal["fp32", "bf16"]

PRECISIONS: dict[str, str] = {"fp32": "f32", "bf16": "bf16"}
"""Precision of matrix products to OpenVINO's word for it; norms, softmax and sums stay in what each operator needs."""

MOST_KEPT = 16
"""Compiled models that are kept, each about as large as its file; the one that was used longest ago goes first."""

_SUFFIX = ".blob"
_LONGEST_HEAD = 4096
_DEVICE = "CPU"
_FORM = "antialias"
"""What is changed between reading and compiling: what was kept of another form is not this model."""


@functools.cache
def core() -> Any:
    """Return the process's ``openvino.Core``.

    Raises:
        UnavailableError: OpenVINO is not installed or does not load.
    """
    require("openvino")
    with importing("OpenVINO's Python package does not load here ({error}); install it again: pip install openvino"):
        import openvino

        _cores.update(_usable())
        return openvino.Core()


_cores: set[int] = set()
"""Cores of the process when OpenVINO was started in it: its threads keep to them."""


def _usable() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def check_cores() -> None:
    """Refuse to run where OpenVINO's threads would not be on the cores that the process was pinned to since.

    Raises:
        UsageError: OpenVINO was started in this process while it had other cores.
    """
    core()
    if _cores != (now := _usable()):
        raise UsageError(
            f"OpenVINO was started in this process on cores {sorted(_cores)} and its threads stay there; the process "
            f"is on {sorted(now)} now: run it in a process of its own"
        )


def version() -> str:
    """Return OpenVINO's version with its build."""
    core()
    import openvino

    return str(openvino.__version__)


@functools.cache
def capabilities() -> frozenset[str]:
    """Return what OpenVINO's CPU plugin runs natively on this processor, for instance ``BF16`` and ``INT8``."""
    return frozenset(map(str, core().get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES")))


def default_precision() -> Precision:
    """Return ``bf16`` where the processor multiplies bf16 (AVX512_BF16 or AMX), else ``fp32``."""
    return "bf16" if "BF16" in capabilities() else "fp32"


def check_precision(precision: str) -> None:
    """Refuse a precision that OpenVINO would replace by another without a word.

    Raises:
        UsageError: neither fp32 nor bf16.
        UnavailableError: bf16, on a processor without it.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"`openvino` computes in {' or '.join(PRECISIONS)}, not in {precision}; give one of them")
    if precision == "bf16" and default_precision() != "bf16":
        raise UnavailableError(
            "`openvino` in bf16 needs a processor with AVX512_BF16 or AMX, which this one is not; give --precision fp32"
        )


def settings(precision: str, threads: int, streams: int = 1) -> dict[str, Any]:
    """Return OpenVINO's properties for a compiled model.

    Args:
        precision: ``fp32`` or ``bf16`` of matrix products.
        threads: of all streams together.
        streams: calls that run at once, each on its share of the threads.

    Threads are not pinned by OpenVINO: two processes would pin theirs to the same cores. They stay on the cores that
    the process may use.
    """
    return {
        "INFERENCE_PRECISION_HINT": PRECISIONS[precision],
        "EXECUTION_MODE_HINT": "PERFORMANCE",
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": streams,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
        "ENABLE_HYPER_THREADING": True,
        "SCHEDULING_CORE_TYPE": "ANY_CORE",
        # or activations that meet int8 weights would be rounded to int8 as they come
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }


def compile_file(path: Path, *, precision: str, threads: int, streams: int = 1, cache: bool = True) -> Any:
    """Compile an ONNX or IR file for the CPU, or read what was compiled of the same content before.

    Args:
        path: ``.onnx`` with its external data, or ``.xml`` with its ``.bin``.
        precision: of products: ``fp32`` or ``bf16``; int8 is a property of the file.
        threads: of the CPU, 1 or more.
        streams: calls that run at once; the threads are divided among them.
        cache: keep the compiled model under `vtk.files.home`, and read it from there.

    Returns:
        An ``openvino.CompiledModel``.

    Raises:
        UsageError: a precision, more streams than threads, or a process that has moved to other cores.
        UnavailableError: OpenVINO is not installed, or bf16 is requested on a processor without it.
        DataError: OpenVINO cannot read or compile the file.
    """
    check_precision(precision)
    check_cores()
    if not 1 <= streams <= threads:
        raise UsageError(f"{streams} streams on {threads} threads: each needs a thread of its own; give 1 to {threads}")
    properties = settings(precision, threads, streams)
    kept = _place(path, properties) if cache else None
    if kept is not None and (compiled := _load(kept, properties)) is not None:
        return compiled
    try:
        model = core().read_model(path)
        if path.suffix == ".onnx":
            antialias(model)
        compiled = core().compile_model(model, _DEVICE, properties)
    except Exception as error:  # a RuntimeError with the place in OpenVINO's own source before the reason
        raise DataError(f"OpenVINO {version()} cannot compile {path}: {reason(error)}") from error
    if kept is not None and kept == _place(path, properties):  # the files have not been replaced while they were read
        _store(kept, compiled)
    return compiled


def reason(error: BaseException) -> str:
    """Return the last line of one of OpenVINO's errors that says something; the first ones are places in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Exception from", "Check '"))] or lines
    return (said[-1] if said else type(error).__name__)[:400]


def content_digest(path: Path) -> str:
    """Return the sha256 of a model's files: the graph, and its weights beside it.

    Raises:
        DataError: one cannot be read.
    """
    digest = hashlib.sha256()
    for file in (path, *_weights_of(path)):
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    return digest.hexdigest()


def _weights_of(path: Path) -> list[Path]:
    if path.suffix == ".xml":
        return [path.with_suffix(".bin")]
    from vtk.runtime.external import external_ends
    from vtk.runtime.onnx_file import load_proto

    return [path.parent / name for name in sorted(external_ends(load_proto(path), path))]


def _place(path: Path, properties: dict[str, Any]) -> Path:
    machine = [str(core().get_property(_DEVICE, "FULL_DEVICE_NAME")), *sorted(capabilities())]
    key = json.dumps([content_digest(path), sorted(properties.items()), version(), machine, _FORM], default=str)
    return home() / "openvino" / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}{_SUFFIX}"


def _load(kept: Path, properties: dict[str, Any]) -> Any:
    """Return the compiled model of a kept file; None where there is none, or it is damaged."""
    try:
        with kept.open("rb") as stream:
            head, data = stream.readline(_LONGEST_HEAD), stream.read()
        if head.strip().decode("ascii", "replace") != hashlib.sha256(data).hexdigest():
            return None
        compiled = core().import_model(io.BytesIO(data), _DEVICE, properties)
    except Exception:  # whatever is wrong with it, it is compiled again and replaced
        return None
    with contextlib.suppress(OSError):
        os.utime(kept)
    return compiled


def _store(kept: Path, compiled: Any) -> None:
    """Keep a compiled model, if the folder can be written and the model exported; drop the oldest of too many."""
    try:
        data = compiled.export_model().getvalue()
        with replace_file(kept) as temporary, temporary.open("wb") as stream:
            stream.write(hashlib.sha256(data).hexdigest().encode() + b"\n")
            stream.write(data)
        sweep(kept.parent, lambda name: name.endswith(_SUFFIX))
        ages = sorted(kept.parent.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for old in ages[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
    except (DataError, OSError, RuntimeError):  # it is only quicker with it
        return
