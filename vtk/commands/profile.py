"""``vtk profile``: latency, throughput and memory per batch size and back-end, outputs compared before any number."""

import shlex

from vtk import console
from vtk.commands import _cli
from vtk.profiling.config import ProfileConfig


def main(argv: list[str]) -> int:
    """Run ``vtk profile``; exit code 4 when a back-end gave wrong outputs."""
    config = _cli.parse(
        ProfileConfig,
        argv,
        prog="vtk profile",
        description=__doc__,
        positional=("source",),
        examples=(
            "vtk profile runs/pets/task --budget-ms 20 --out runs/pets/profile",
            "vtk profile runs/pets/onnx/model.onnx --backends ort-cpu --threads 4",
            "vtk profile vit_small_patch16_224 --no-pretrained --batch-sizes 1,8 --backends eager,compile",
        ),
    )
    from vtk.profiling.profile import profile
    from vtk.profiling.report import FILES, print_result

    result = profile(config, command=shlex.join(["vtk", "profile", *argv]))
    print_result(result)
    if config.out is not None:
        console.say()
        for name in FILES:
            console.say(f"wrote {config.out / name}")
    else:
        console.say("no files written; --out DIR writes a plot, a page for the browser, JSON and CSV")
    console.emit_json(result.to_dict())
    return result.exit_code
