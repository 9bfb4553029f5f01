"""The command that exports what the search found, ready to be pasted, and how the file is to be run."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtk.profiling.config import ProfileConfig
from vtk.profiling.search.setup import Setup
from vtk.profiling.search.variants import INT8
from vtk.runtime.openvino_runtime import PRECISIONS, default_precision
from vtk.runtime.source import MODELS, Source

EXPORTED = ("openvino", "ort-cpu", "aoti", "bank")
"""Back-ends with an export; the others run in a Python process with this toolkit."""


def command_for(setup: Setup, source: Source, given: str, config: ProfileConfig, opening: Mapping[str, Any]) -> str:
    """Return the command line that exports a setup; empty for a source that is a file already, or in memory.

    Args:
        setup: the recommendation.
        source: that was searched.
        given: the source as it was typed; empty if it was not.
        config: of the search.
        opening: how the source was opened.
    """
    if source.kind not in MODELS or setup.backend not in EXPORTED or not given:
        return ""
    target, flags = _target(setup, config)
    name = f"{source.name}-{setup.backend}-{setup.precision}"
    out = _free(Path("exports") / "".join(c if c.isalnum() or c in "._-" else "-" for c in name))
    return shlex.join(["vtk", "export", target, given, "--out", str(out), *flags, *_opening(opening, target)])


def note_for(setup: Setup) -> str:
    """Return in one line how what was found is run."""
    copies = f"{setup.instances} processes" if setup.instances > 1 else "one process"
    threads = f"{setup.threads} thread{'s' * (setup.threads != 1)}"
    text = f"run it in {copies} of {threads}{' each' * (setup.instances > 1)}, {setup.batch} images a call"
    text = text.replace("1 images", "1 image") if setup.batch == 1 else text
    if setup.backend == "openvino":
        rest = setup.precision if setup.precision in PRECISIONS else default_precision()  # of what is not int8
        return (
            f"{text} (OpenVINO: INFERENCE_PRECISION_HINT {PRECISIONS[rest]}, INFERENCE_NUM_THREADS {setup.threads}, "
            "NUM_STREAMS 1)"
        )
    if setup.backend == "ort-cpu":
        return f"{text} (ONNX Runtime: intra_op_num_threads {setup.threads})"
    if setup.backend in ("fused", "eager"):
        made = f"--backend {setup.backend} --precision {setup.precision} --threads {setup.threads}"
        return f"{text}: it has no file; vtk predict and vtk.load_backend run it with {made}"
    return text


def _target(setup: Setup, config: ProfileConfig) -> tuple[str, list[str]]:
    data = ["--data", str(config.data)] if config.data is not None else []
    int8 = ["--int8", INT8[setup.precision]] if setup.precision in INT8 else []
    if setup.backend == "aoti":
        return "aoti", ["--dtype", setup.precision, "--device", "cpu", *data]
    if setup.backend == "bank":
        return "triton", [
            "--backend", "vtk", "--dtype", setup.precision, "--server-device", "cpu", "--max-batch-size",
            str(setup.batch), "--instances", str(setup.instances), "--server-threads", str(setup.threads), *data,
        ]  # fmt: skip
    if setup.backend == "openvino":
        # the precision of an int8 file's other products is the processor's
        own = ["--precision", setup.precision] if setup.precision not in INT8 else []
        return "openvino", [*own, *int8, *data]
    return "onnx", [*int8, *data]


def _opening(opening: Mapping[str, Any], target: str) -> list[str]:
    """Return the options that open the source in the same way."""
    found: list[str] = []
    if opening.get("base") is not None:
        found += ["--base", str(opening["base"])]
    if target == "triton":  # of packs, which have their own classes and sizes
        return found
    if opening.get("pretrained") is False:
        found.append("--no-pretrained")
    if opening.get("num_classes") is not None:
        found += ["--num-classes", str(opening["num_classes"])]
    if (size := opening.get("img_size")) is not None:
        found += ["--img-size", *map(str, size if isinstance(size, Sequence) else (size,))]
    if opening.get("trust"):
        found.append("--trust")
    if opening.get("seed"):
        found += ["--seed", str(opening["seed"])]
    return found


def _free(folder: Path) -> Path:
    """Return a folder that is not there yet."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free
