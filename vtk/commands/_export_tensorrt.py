"""``vtk export tensorrt``."""

from pathlib import Path
from typing import TYPE_CHECKING

from vtk import console
from vtk.commands import _cli

if TYPE_CHECKING:
    from vtk_export.tensorrt.config import TensorrtCommand

_TEXT = """Export an ONNX file for TensorRT's parser, with scripts that build an engine on the target GPU.

The graph has q, k and v as three products, the scale folded into q, one Softmax between two products, and norms as one
node each: the form that TensorRT's fused kernels are found in. It is verified with ONNX Runtime against torch (exit
code 4 otherwise), then linted: if it has an operator, type or shape that the version does not support, nothing is kept.

Beside model.onnx: build.sh (trtexec), build_engine.py (the same by TensorRT's Python package, with a stamp that is
checked on loading), compare.sh (polygraphy against ONNX Runtime), profile.json (shapes). --lint only checks an .onnx.

Linted; not yet built on a device."""


def main(argv: list[str]) -> int:
    """Run ``vtk export tensorrt``."""
    from vtk_export.tensorrt.config import TensorrtCommand

    config = _cli.parse(
        TensorrtCommand,
        argv,
        prog="vtk export tensorrt",
        description=_TEXT,
        positional=("source",),
        examples=(
            "vtk export tensorrt runs/pets/task --dtype fp16 --data data/pets --out exports/pets-trt",
            "vtk export tensorrt vit_small_patch16_224 --trt 11.x --opt 32 --max 64 --out exports/vits-trt",
            "vtk export tensorrt vit_small_patch16_224 --static-batch 8 --out exports/vits8-trt --profile 8",
            "vtk export tensorrt other/model.onnx --lint --trt 10.3",
        ),
    )
    if config.lint:
        return _lint(config)
    from vtk.profiling.export_profile import onnx_backends, profile_onnx
    from vtk.runtime.opening import open_with_notes
    from vtk_export.tensorrt.export import export_tensorrt

    backends = onnx_backends(config.dtype, engine=config.build) if config.profile else ()
    source = open_with_notes(config.source, **config.opening())
    result = export_tensorrt(source, config)
    for finding in result.findings:
        console.say(f"slow: {finding.line()}")
    graph = f"{result.nodes} nodes" + (", fused" if result.fused else "")
    size = console.size(result.bytes)
    state = "built on this GPU" if result.engine else "linted; not yet built on a device"
    console.say(f"{result.path}: {result.precision}, opset {result.opset}, {graph}, {size}, {result.seconds:.1f} s")
    console.say(f"TensorRT {result.tensorrt} or newer: {state}")
    if result.precision == "fp32":
        console.say("TensorRT has no fused attention in fp32: --dtype fp16 or bf16 is faster")
    if result.engine is None:
        console.say("on the target GPU: bash build.sh, or python build_engine.py")
    found, code = result.to_dict(), 0
    if config.profile:
        if result.engine is None:
            console.say("latency of the ONNX file in ONNX Runtime; --build measures the TensorRT engine")
        code, found["profile"] = profile_onnx(
            result.path, config.profile, source, precision=config.rest, threads=config.threads, backends=backends
        )
    console.emit_json(found)
    return code


def _lint(config: "TensorrtCommand") -> int:
    import dataclasses

    from vtk.errors import VerificationError
    from vtk_export.lint.finding import REFUSED
    from vtk_export.lint.linter import lint, load

    path = Path(config.source)
    path = path / "model.onnx" if path.is_dir() else path
    found = lint(load(path), config.runtime)
    refused = sum(finding.level == REFUSED for finding in found)
    for finding in found:
        console.say(f"{finding.level}: {finding.line()}")
    console.say(f"{path} for TensorRT {config.runtime.version}: {refused} refused, {len(found) - refused} slow")
    console.emit_json({"path": str(path), "tensorrt": config.runtime.version,
                       "findings": [dataclasses.asdict(finding) for finding in found]})  # fmt: skip
    return VerificationError.exit_code if refused else 0
