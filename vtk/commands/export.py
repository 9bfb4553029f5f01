"""``vtk export TARGET``: files for other run times, each verified before it is kept."""

import difflib

from vtk import console
from vtk.commands import _cli
from vtk.errors import UsageError

TARGETS = {"onnx": "an ONNX file that any ONNX Runtime loads"}
NOT_YET = ("tensorrt", "triton", "aoti")

_ONNX = """Export a pack, a merged checkpoint or a timm model to DIR/model.onnx with torch's dynamo exporter.

The file is run with ONNX Runtime at batch sizes 1, 2, 3, 7 and 16 on different images and compared with torch in fp32;
it is kept only if the largest error is at most 1e-4 of the largest logit and the classes agree (exit code 4 otherwise).
Size, preprocessing and class names travel inside the file and beside it in model.json.

Models with parallel branches are folded and merged first (--fuse, --no-fuse): half of the nodes, standard operators
only. --fuse does it to any Vision Transformer of timm and refuses what it does not know by name."""


def main(argv: list[str]) -> int:
    """Dispatch to the target named first."""
    if not argv or argv[0] in ("-h", "--help"):
        lines = ["usage: vtk export TARGET [OPTIONS]", "", *(f"  {name:<10} {text}" for name, text in TARGETS.items())]
        print("\n".join([*lines, "", "vtk export TARGET --help shows the options."]))
        return 0
    target, rest = argv[0], argv[1:]
    if target in NOT_YET:
        raise UsageError(f"`export {target}` is not in this version; it has: {', '.join(TARGETS)}")
    if target not in TARGETS:
        near = difflib.get_close_matches(target, TARGETS, 1)
        hint = f"did you mean `vtk export {near[0]}`?" if near else f"choose one of: {', '.join(TARGETS)}"
        raise UsageError(f"unknown export target `{target}`; {hint}")
    return _onnx(rest)


def _onnx(argv: list[str]) -> int:
    from vtk_export.config import OnnxConfig

    config = _cli.parse(
        OnnxConfig,
        argv,
        prog="vtk export onnx",
        description=_ONNX,
        positional=("source",),
        examples=(
            "vtk export onnx runs/pets/task --out exports/pets --data data/pets/val",
            "vtk export onnx vit_small_patch16_224 --out exports/vits --static-batch 8",
        ),
    )
    from vtk.runtime.source import open_source
    from vtk_export.onnx import export_onnx

    source = open_source(
        config.source,
        base=config.base,
        pretrained=config.pretrained,
        num_classes=config.num_classes,
        img_size=config.img_size,
        seed=config.seed,
    )
    for note in source.notes:
        console.say(note)
    result = export_onnx(source, config)
    batch = "any batch size" if result.batch is None else f"batch size {result.batch} only"
    graph = f"{result.nodes} nodes" + (", fused" if result.fused else "")
    size = console.size(result.bytes)
    console.say(f"{result.path}: opset {result.opset}, {batch}, {graph}, {size}, {result.seconds:.1f} s")
    console.emit_json(result.to_dict())
    return 0
