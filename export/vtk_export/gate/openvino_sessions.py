"""Opens files in OpenVINO for the gate: an ONNX file or an IR, compiled afresh in one precision."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from vtk.errors import DataError, VerificationError
from vtk.runtime.backends.base import Backend, load_backend
from vtk.runtime.opening import open_source
from vtk_export.gate.limits import LIMITS, Limits
from vtk_export.gate.verify import Sessions


def opener(path: Path, precision: str, threads: int | None) -> Sessions:
    """Return what opens a file in a precision, compiled afresh: what was kept is not what was written.

    Raises:
        VerificationError: on opening, OpenVINO refuses the file.
    """

    @contextlib.contextmanager
    def opened() -> Iterator[Sequence[Backend]]:
        try:
            session = load_backend("openvino", open_source(path), dtype=precision, threads=threads, raw=True,
                                   cache=False)  # fmt: skip
        except DataError as error:
            raise VerificationError(str(error)) from error
        try:
            yield (session,)
        finally:
            session.close()

    return opened


def precisions() -> tuple[str, ...]:
    """Return the precisions of products that OpenVINO has on this processor.

    Raises:
        UnavailableError: OpenVINO is not installed.
    """
    from vtk.runtime.openvino_runtime import default_precision

    return ("fp32", "bf16") if default_precision() == "bf16" else ("fp32",)


def limits_in(kind: str, precision: str) -> Limits:
    """Return the bounds of outputs of a ``kind`` of file (`Facts.kind`) with products in a precision."""
    return LIMITS["bf16" if precision == "bf16" and kind != "int8" else kind]
