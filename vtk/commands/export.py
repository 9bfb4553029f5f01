"""``vtk export TARGET``: files for other runtimes, each verified before it is kept."""

import difflib

from vtk import console
from vtk.commands import _cli
from vtk.errors import UsageError

TARGETS = {
    "onnx": "an ONNX file that any ONNX Runtime loads",
    "openvino": "an OpenVINO model (IR) for CPUs, in fp32, bf16 or int8",
    "aoti": "a .pt2 compiled by AOTInductor, for C++ and Python",
    "tasks": "one ONNX file per task, weights shared, or one for mixed batches",
    "tensorrt": "an ONNX file for TensorRT, with scripts that build its engine",
    "triton": "a model repository for Triton Inference Server, one task or many",
}

_ONNX = """Export a pack, a merged checkpoint or a timm model to DIR/model.onnx with torch's dynamo exporter.

The file is run with ONNX Runtime at batch sizes 1, 2, 3, 7 and 16 on different images and compared with torch in fp32;
it is kept only if the largest error is at most 1e-4 of the largest logit and the classes agree (exit code 4 otherwise).
Size, preprocessing and class names travel inside the file and beside it in model.json.

fp16, bf16 (--dtype) and int8 files (--int8) are judged by the cosine with torch, and with --data by the share of images
with torch's class and by the accuracy on folders named after the classes. docs/guides/export.md has the bounds.

Vision Transformers of timm are fused first if all their parts are supported: fewer nodes, standard operators only, the
same numbers up to rounding. --fuse makes an unsupported part an error, --no-fuse exports the model as it is."""

_TASKS = """Export packs of one base to one folder, in one of three forms, or two of them.

files: one DIR/NAME.onnx per task, each with its own image size; all refer to one data file with the shared weights,
which ONNX Runtime maps into memory once (session options: docs/guides/bank.md). gathered: one
DIR/gathered.onnx with the inputs `pixel_values` and `task` (int32 per image), for tasks of one image size; its
`logits` are padded to the most classes, `num_classes` says how many are an image's own. factors: one DIR/factors.onnx
that takes the tasks' low-rank changes as inputs, and one DIR/NAME.safetensors per task (vtk tasks compress); tasks are
added and removed while it runs.

NAME is by default that of the pack's run folder. Each file is run with ONNX Runtime and compared with torch and with a
bank of the packs; the folder is written only if all agree (exit code 4 otherwise)."""


def main(argv: list[str]) -> int:
    """Dispatch to the target named first."""
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        lines = ["usage: vtk export TARGET [OPTIONS]", "", *(f"  {name:<10} {text}" for name, text in TARGETS.items())]
        print("\n".join([*lines, "", "vtk export TARGET --help shows the options."]))
        return 0
    target, rest = argv[0], argv[1:]
    if target not in TARGETS:
        near = difflib.get_close_matches(target, TARGETS, 1)
        hint = f"did you mean `vtk export {near[0]}`?" if near else f"choose one of: {', '.join(TARGETS)}"
        raise UsageError(f"unknown export target `{target}`; {hint}")
    if target == "openvino":
        from vtk.commands._export_openvino import main as openvino

        return openvino(rest)
    if target == "aoti":
        from vtk.commands._export_aoti import main as aoti

        return aoti(rest)
    if target == "tensorrt":
        from vtk.commands._export_tensorrt import main as tensorrt

        return tensorrt(rest)
    if target == "triton":
        from vtk.commands._export_triton import main as triton

        return triton(rest)
    return _tasks(rest) if target == "tasks" else _onnx(rest)


def _onnx(argv: list[str]) -> int:
    from vtk_export.onnx.config import OnnxCommand

    config = _cli.parse(
        OnnxCommand,
        argv,
        prog="vtk export onnx",
        description=_ONNX,
        positional=("source",),
        examples=(
            "vtk export onnx runs/pets/task --out exports/pets --data data/pets",
            "vtk export onnx vit_small_patch16_224 --out exports/vits --static-batch 8",
            "vtk export onnx runs/pets/task --out exports/pets-fp16 --dtype fp16 --data data/pets",
            "vtk export onnx runs/pets/task --out exports/pets-int8 --int8 static --data data/pets",
        ),
    )
    from vtk.profiling.export_profile import onnx_backends, profile_onnx
    from vtk.runtime.opening import open_with_notes
    from vtk_export.onnx.export import export_onnx

    backends = onnx_backends(config.dtype) if config.profile else ()
    source = open_with_notes(config.source, **config.opening())
    result = export_onnx(source, config)
    batch = "any batch size" if result.batch is None else f"batch size {result.batch} only"
    graph = f"{result.nodes} nodes" + (", fused" if result.fused else "")
    size = console.size(result.bytes)
    console.say(result.needs())
    console.say(f"{result.path}: opset {result.opset}, {batch}, {graph}, {size}, {result.seconds:.1f} s")
    found, code = result.to_dict(), 0
    if config.profile:
        code, found["profile"] = profile_onnx(
            result.path, config.profile, source, precision=config.rest, threads=config.threads, backends=backends
        )
    console.emit_json(found)
    return code


def _tasks(argv: list[str]) -> int:
    from vtk_export.tasks.config import TasksCommand

    config = _cli.parse(
        TasksCommand,
        argv,
        prog="vtk export tasks",
        description=_TASKS,
        positional=("packs",),
        examples=(
            "vtk export tasks runs/pets runs/cars --out exports/all --data data/pets",
            "vtk export tasks pets=runs/a/task cars=runs/b/task --form gathered --out exports/mixed --profile 1,8",
            "vtk export tasks packs/* --form factors --out exports/hundred",
        ),
    )
    from vtk.profiling.export_profile import check_task_names, profile_tasks
    from vtk_export.tasks.export import export_tasks

    if config.profile:
        check_task_names(config)
    result = export_tasks(config.packs, config, base=config.base)
    alone = console.size(result.separate_bytes)
    console.say(result.needs())
    for file in result.files if result.factors is None else ():
        console.say(f"{file.path}: {console.size(file.bytes)}, and {console.size(file.shared_bytes)} shared")
    if result.factors is not None:
        own = [file.bytes for file in result.files]
        console.say(f"{result.factors}: {console.size(result.files[0].shared_bytes)}, and {console.size(min(own))} to "
                    f"{console.size(max(own))} of each of {len(own)} tasks")  # fmt: skip
    if result.gathered is not None:
        console.say(f"{result.gathered}: {len(result.tasks)} tasks, in this order: {', '.join(result.tasks)}")
    console.say(f"{result.path}: {console.size(result.bytes)} in place of {alone}, {result.seconds:.1f} s")
    found, code = result.to_dict(), 0
    if config.profile:
        code, found["profile"] = profile_tasks(result, config)
    console.emit_json(found)
    return code
