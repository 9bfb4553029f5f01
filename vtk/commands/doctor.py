"""Check versions, devices, ONNX Runtime providers and conflicts, and suggest fixes.

`vtk doctor --tune` measures on a CUDA GPU which implementations are fastest for your models, and
stores the result."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator

from vtk import console
from vtk.commands import _cli, _doctor_checks, _doctor_openvino, _doctor_providers
from vtk.commands._doctor_checks import Check
from vtk.commands._doctor_tune import DoctorConfig, run

_STYLES = {"ok": None, "note": "dim", "problem": "yellow", "fatal": "bold red"}


def main(argv: list[str]) -> int:
    """Run ``vtk doctor``; exit code 1 if fine-tuning, evaluating or exporting cannot work.

    With ``--tune`` nothing is checked: choices are measured on the GPU.
    """
    config = _cli.parse(
        DoctorConfig, argv, prog="vtk doctor", description=__doc__, positional=("models",),
        examples=("vtk doctor", "vtk doctor --json", "vtk doctor --tune runs/pets/task --batch-sizes 1,16"),
    )  # fmt: skip
    if config.tune:
        return run(config)
    checks = tuple(examine())
    show(checks)
    code = exit_code(checks)
    problems = sum(check.status in ("problem", "fatal") for check in checks)
    console.emit_json({"checks": [_plain(check) for check in checks], "problems": problems, "exit_code": code})
    return code


def examine() -> Iterator[Check]:
    """Run all checks; if torch does not import, those that need it are skipped, and a note says so."""
    trial = _doctor_providers.Trial(with_torch=_doctor_checks.nvidia_driver())  # runs while the other checks do
    openvino = _doctor_openvino.Trial()
    installed = _doctor_checks.distributions()
    yield from _doctor_checks.check_python()
    yield from _doctor_checks.check_packages(installed)
    broken = tuple(_doctor_checks.check_torch())
    yield from broken
    if broken:
        yield Check("devices", "torch", "note", "devices were not checked, as torch does not import")
        cuda_device, torch_cuda = False, None
    else:
        import torch

        yield from _doctor_checks.check_devices()
        cuda_device, torch_cuda = torch.cuda.is_available(), torch.version.cuda
    yield from _doctor_checks.check_triton()
    yield from _doctor_providers.check_providers(trial, cuda_device, torch_cuda)
    yield from openvino.check()
    yield from _doctor_checks.check_conflicts(installed)
    yield from _doctor_checks.check_storage()


def _plain(check: Check) -> dict[str, str]:
    """Return a check as JSON, in which the fix has kept its name of version 0.1, ``mend``."""
    values = dataclasses.asdict(check)
    return {**{name: value for name, value in values.items() if name != "fix"}, "mend": check.fix}


def exit_code(checks: tuple[Check, ...]) -> int:
    """Return 1 if a check is fatal, else 0."""
    return int(any(check.status == "fatal" for check in checks))


def show(checks: tuple[Check, ...]) -> None:
    """Print the checks under their headings, each with its fix, and a summary."""
    for group, members in itertools.groupby(checks, key=lambda check: check.group):
        console.say(group, style="bold")
        for check in members:
            start = f"  {check.status:<8}{check.name:<20} "
            text = textwrap.wrap(start + check.detail, 80, subsequent_indent=" " * 31, break_on_hyphens=False)
            console.say(*text, style=_STYLES[check.status])
            if check.fix:
                fix = f"          → {check.fix}"
                lines = textwrap.wrap(fix, 80, subsequent_indent=" " * 12, break_on_hyphens=False)
                console.say(*lines, style=_STYLES[check.status])
    wrong = [check for check in checks if check.status in ("problem", "fatal")]
    fatal = sum(check.status == "fatal" for check in wrong)
    console.say()
    if fatal:
        console.say(f"{fatal} of {len(wrong)} problems must be fixed before the toolkit can work", style="bold red")
    elif wrong:
        console.say(f"works, with {len(wrong)} problem{'s' * (len(wrong) > 1)} to fix", style="yellow")
    else:
        console.say("no problems", style="green")
