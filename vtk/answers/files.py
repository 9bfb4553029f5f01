"""A back-end that runs ONNX files, for a source that is none yet."""

import contextlib
from collections.abc import Iterator

from vtk.runtime.backend import check_backend
from vtk.runtime.source import Source


@contextlib.contextmanager
def runnable(source: Source, backend: str | None) -> Iterator[Source]:
    """Give what ``backend`` runs: the source, or a verified ONNX file of it that is gone at the end of the block.

    Raises:
        UsageError: no such back-end.
        UnavailableError: it is not here.
    """
    if backend is None or not backend.startswith("ort-") or source.kind == "onnx":
        yield source
        return
    check_backend(backend)
    from vtk_export.onnx import temporary_onnx  # takes packages that a machine which only evaluates may lack

    with temporary_onnx(source) as made:
        yield made
