"""``vtk export aoti``."""

from vtk import console
from vtk.commands import _cli
from vtk.profiling.export_profile import profile_export

_TEXT = """Compile a pack, a merged checkpoint or a timm model ahead of time to DIR/model.pt2 with torch's AOTInductor.

The model is folded and merged first, as far as it can be (--fuse insists, --no-fuse leaves it as it is). The file takes
any batch up to 4096, holds its weights and its card, and needs none of this toolkit to run. It is specific to this
torch release, kind of device and CPU instruction set.

Compiled code does not check its inputs, so load it with DIR/load.py, or as DIR/example.cpp does; see DIR/README.md.
`vtk profile`, `vtk eval` and `vtk predict` take the file.

load.py and the compiled code are run in a process of their own, at batch sizes 1, 2, 3, 7 and 16 on different images in
ten memory layouts, and compared with torch in fp32; images of other types, sizes and numbers must be refused. What
fails is not kept (exit code 4). Compilation takes a C++ compiler and a minute or more."""


def main(argv: list[str]) -> int:
    """Run ``vtk export aoti``."""
    from vtk_export.aoti.config import AotiCommand

    config = _cli.parse(
        AotiCommand,
        argv,
        prog="vtk export aoti",
        description=_TEXT,
        positional=("source",),
        examples=(
            "vtk export aoti runs/pets/task --out exports/pets-aoti --data data/pets",
            "vtk export aoti vit_small_patch16_224 --dtype bf16 --device cuda --out exports/vits --profile 1,8,32",
        ),
    )
    from vtk.runtime.opening import open_with_notes
    from vtk_export.aoti.export import export_aoti

    source = open_with_notes(config.source, **config.opening())
    result = export_aoti(source, config)
    graph = "fused" if result.fused else "as it is"
    size = console.size(result.bytes)
    console.say(f"{result.path}: {result.precision} on {result.device}, {graph}, {size}, {result.seconds:.1f} s")
    found = result.to_dict()
    code = 0
    if config.profile:
        code, found["profile"] = profile_export(
            result.path, config.profile, backends=("aoti",), device=result.device, precision=result.precision,
            threads=config.threads, reference=source,
        )  # fmt: skip
    console.emit_json(found)
    return code
