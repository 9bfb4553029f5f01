"""``vtk export openvino``."""

from vtk import console
from vtk.commands import _cli

_TEXT = """Export a pack, a merged checkpoint or a timm model to DIR/model.xml and model.bin, for OpenVINO on CPUs.

Card, facts and labels are in the model's metadata, and the card beside it in model.json. --with-preproc puts resizing
and normalising into it, so that it takes raw images. OpenVINO computes its products in fp32 or bf16 whatever the file
stores (--precision); int8 is a property of the file (--int8).

The file is run with OpenVINO at batch sizes 1, 2, 3, 7 and 16 on different images and compared with torch in fp32, in
each precision that it is meant for; it is kept only if it passes (exit code 4 otherwise). `vtk profile`, `vtk eval` and
`vtk predict` take the file. docs/guides/openvino.md has the bounds."""


def main(argv: list[str]) -> int:
    """Run ``vtk export openvino``."""
    from vtk_export.openvino.config import OpenvinoCommand

    config = _cli.parse(
        OpenvinoCommand,
        argv,
        prog="vtk export openvino",
        description=_TEXT,
        positional=("source",),
        examples=(
            "vtk export openvino runs/pets/task --out exports/pets-ov --data data/pets",
            "vtk export openvino runs/pets/task --out exports/pets-raw --with-preproc --precision fp32",
            "vtk export openvino runs/pets/task --out exports/pets-int8 --int8 static --data data/pets",
        ),
    )
    from vtk.profiling.export_profile import profile_export
    from vtk.runtime.opening import open_with_notes
    from vtk_export.openvino.export import export_openvino

    source = open_with_notes(config.source, **config.opening())
    result = export_openvino(source, config)
    batch = "any batch size" if result.batch is None else f"batch size {result.batch} only"
    graph = ", fused" if result.fused else ""
    size = console.size(result.bytes)
    products = f"int8, the rest in {result.precision}" if config.int8 else result.precision
    console.say(f"{result.path}: products in {products}, {batch}{graph}, {size}, {result.seconds:.1f} s")
    found, code = result.to_dict(), 0
    if config.profile:
        code, found["profile"] = profile_export(
            result.path, config.profile, backends=("openvino",), device="cpu", precision=result.precision,
            threads=config.threads, reference=source,
        )  # fmt: skip
    console.emit_json(found)
    return code
