"""``--profile 1,8,32`` of any export: the file's latency, left beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtk import console

if TYPE_CHECKING:
    from vtk.runtime.source import Source
    from vtk_export.config import OnnxConfig

SECONDS = 3.0
"""Of each cell, at most; `vtk profile` on the file takes longer and says more."""


def profile_onnx(path: Path, config: "OnnxConfig", source: "Source") -> tuple[int, dict[str, Any]]:
    """Measure an exported ONNX file with ONNX Runtime on the CPU, and on CUDA where that can be.

    Args:
        path: of the file.
        config: what it was exported with.
        source: what it was exported from.

    Returns:
        As of `profile_export`.
    """
    from vtk.errors import UnavailableError
    from vtk.runtime.backend import check_backend

    backends: tuple[str, ...] = ("ort-cpu",)
    try:
        check_backend("ort-cuda")
        backends = (*backends, "ort-cuda")
    except UnavailableError as error:
        console.say(f"latency on the CPU alone: {error}")
    # probabilities do not say what the logits were, only how they differ
    reference = None if config.softmax else source
    return profile_export(
        path, config.profile, backends=backends, precision=config.dtype, threads=config.threads, reference=reference
    )


def profile_export(
    path: Path,
    batches: Sequence[int],
    *,
    backends: tuple[str, ...],
    device: str = "auto",
    precision: str = "fp32",
    threads: int | None = None,
    reference: "Source | None" = None,
) -> tuple[int, dict[str, Any]]:
    """Measure an exported file and leave ``latency.json`` and ``latency.png`` beside it.

    Args:
        path: of the file.
        batches: images per call.
        backends: that run it.
        device: as of ``vtk profile``.
        precision: of the file.
        threads: CPU threads.
        reference: what its outputs are compared with; None for the file without graph optimisation.

    Returns:
        `vtk profile`'s exit code, and what is in ``latency.json``.
    """
    from vtk.files import replace_file, write_json
    from vtk.profiling.config import ProfileConfig
    from vtk.profiling.plot import latency_png
    from vtk.profiling.profile import run
    from vtk.profiling.report import print_result
    from vtk.runtime.backend import load_backend
    from vtk.runtime.source import open_source

    options: dict[str, Any] = {"precision": precision, "device": device, "threads": threads, "duration": SECONDS}
    config = ProfileConfig(str(path), batch_sizes=tuple(batches), backends=backends, **options)
    result = run(config, open_source(path), load_backend, reference=reference, command=f"--profile of {path.name}")
    print_result(result)
    found = result.to_dict()
    write_json(path.parent / "latency.json", found)
    with replace_file(path.parent / "latency.png") as tmp:
        tmp.write_bytes(latency_png(result))
    console.say(f"wrote {path.parent / 'latency.json'} and latency.png")
    return result.exit_code, found
