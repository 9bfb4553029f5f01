"""``vtk export triton``."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtk import console
from vtk.commands import _cli

if TYPE_CHECKING:
    from vtk.runtime.source import Source
    from vtk_export.triton.config import TritonCommand

_TEXT = """Write models into a model repository of Triton Inference Server: config, weights, class names and a client.

onnxruntime: each source is a model with a whole copy of its weights, input `pixel_values`, output `logits`. tensorrt:
the same, with engines that the server builds on its GPU, or with an --engine that was built for it. python: all packs
of one base are one model on numpy and onnxruntime, shared weights in memory once. vtk: the same in a bank of
this toolkit; a batch can mix tasks, and exporting again, or --update and --remove, changes its tasks while it serves.
openvino: one task in the server's OpenVINO back-end, and a config for OpenVINO Model Server; neither config was run.
Models of tasks take a `task` name beside each image and give `logits`, `label` and `score`.

With --with-preproc a model takes images: in its graph (`images`, uint8 RGB), or by a step of its own before it, which
also takes files such as JPEG (`encoded`); the logits are compared with the toolkit's own preprocessing.

Every file is verified against torch first (exit code 4). A model appears in the repository complete, under one rename;
exporting again writes the next version, which a polling server takes up while the old one serves."""


def main(argv: list[str]) -> int:
    """Run ``vtk export triton``."""
    from vtk_export.triton.config import TritonCommand

    config = _cli.parse(
        TritonCommand,
        argv,
        prog="vtk export triton",
        description=_TEXT,
        positional=("sources",),
        examples=(
            "vtk export triton runs/pets --out models --data data/pets",
            "vtk export triton pets=runs/a/task cars=runs/b/task --backend vtk --name vit --out models --warmup",
            "vtk export triton dogs=runs/dogs --update --remove cars --backend vtk --name vit --out models",
            "vtk export triton pets=runs/a/task cars=runs/b/task --name vit --with-preproc --out models",
            "vtk export triton runs/pets --int8 static --profile 1,8 --data data/pets --out models",
            "vtk export triton runs/pets --backend python --python-runtime openvino --data data/pets --out models",
            "vtk export triton runs/pets --backend tensorrt --engine exports/pets-trt --out models",
        ),
    )
    from vtk_export.triton.export import export_triton

    result = export_triton(config.sources, config, measure=functools.partial(_measure, config), **config.opening())
    for model in result.models:
        what = "updated in place" if model.updated else f"version {model.version}"
        tasks = f"{len(model.tasks)} task{'s' * (len(model.tasks) != 1)}"
        console.say(f"{model.path}: {what}, {result.backend}, {tasks}, {console.size(model.bytes)}")
        if model.steps:
            steps = ", ".join(f"{name} version {version}" for name, version in model.steps.items())
            console.say(f"  an ensemble of {steps}")
    for line in result.models[0].lines:
        console.say(f"  {line}")
    console.emit_json(result.to_dict())
    return max(model.code for model in result.models)


def _measure(
    config: "TritonCommand", path: Path, shown: Path, precision: str, source: "Source"
) -> tuple[int, dict[str, Any]]:
    from vtk.profiling.export_profile import profile_onnx

    return profile_onnx(path, config.profile, source, precision=precision, threads=config.threads, shown=shown)
