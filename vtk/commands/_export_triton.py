"""``vtk export triton``."""

from vtk import console
from vtk.commands import _cli

_TEXT = """Write models into the repository of a Triton Inference Server: config, weights, class names and a client.

onnxruntime: each source is a model with a whole copy of its weights, input `pixel_values`, output `logits`. tensorrt:
the same, with engines that the server builds on its GPU. python: all packs of one base are one model on numpy and
onnxruntime, what they have in common in memory once. vtk: the same in a bank of this toolkit; a batch mixes tasks, and
exporting again with other packs adds and removes them while it serves. Models of tasks take a `task` name beside each
image and give `logits`, `label` and `score`.

Every file is verified against torch first (exit code 4). A model appears in the repository complete, under one rename;
exporting again writes the next version, which a polling server takes up while the old one serves."""


def main(argv: list[str]) -> int:
    """Run ``vtk export triton``."""
    from vtk_export.triton_config import TritonConfig

    config = _cli.parse(
        TritonConfig,
        argv,
        prog="vtk export triton",
        description=_TEXT,
        positional=("sources",),
        examples=(
            "vtk export triton runs/pets --out models --data data/pets/val",
            "vtk export triton pets=runs/a/task cars=runs/b/task --backend vtk --name vit --out models --warmup",
        ),
    )
    from vtk_export.triton.export import export_triton

    result = export_triton(config)
    for model in result.models:
        what = "updated in place" if model.updated else f"version {model.version}"
        tasks = f"{len(model.tasks)} task{'s' * (len(model.tasks) != 1)}"
        console.say(f"{model.path}: {what}, {result.backend}, {tasks}, {console.size(model.bytes)}")
    for line in result.models[0].lines:
        console.say(f"  {line}")
    console.emit_json(result.to_dict())
    return 0
