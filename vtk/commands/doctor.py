"""``vtk doctor``: versions, devices, ONNX Runtime providers that really load, conflicts; and how to mend each.

`vtk doctor --tune` measures on a CUDA card which implementations are quickest for one's models, and keeps that."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator

from vtk import console
from vtk.commands import _checks, _cli, _providers
from vtk.commands._checks import Check
from vtk.commands._doctor_tune import DoctorConfig, run

_STYLES = {"ok": None, "note": "dim", "problem": "yellow", "fatal": "bold red"}


def main(argv: list[str]) -> int:
    """Run ``vtk doctor``; exit code 1 when something makes fine-tuning, evaluating or exporting impossible.

    With ``--tune`` nothing is examined: choices are measured on the card.
    """
    config = _cli.parse(
        DoctorConfig, argv, prog="vtk doctor", description=__doc__, positional=("models",),
        examples=("vtk doctor", "vtk doctor --json", "vtk doctor --tune runs/pets/task --batch-sizes 1,16"),
    )  # fmt: skip
    if config.tune:
        return run(config)
    found = tuple(examine())
    show(found)
    code = exit_code(found)
    checks = [dataclasses.asdict(check) for check in found]
    problems = sum(check.status in ("problem", "fatal") for check in found)
    console.emit_json({"checks": checks, "problems": problems, "exit_code": code})
    return code


def examine() -> Iterator[Check]:
    """Run all checks; those that need torch are left out, and said to be, when torch does not import."""
    trial = _providers.Trial(with_torch=_checks.nvidia_driver())  # runs while the other checks do
    installed = _checks.distributions()
    yield from _checks.check_python()
    yield from _checks.check_packages(installed)
    broken = tuple(_checks.check_torch())
    yield from broken
    if broken:
        yield Check("devices", "torch", "note", "devices were not looked at, as torch does not import")
        cuda_device, torch_cuda = False, None
    else:
        import torch

        yield from _checks.check_devices()
        cuda_device, torch_cuda = torch.cuda.is_available(), torch.version.cuda
    yield from _checks.check_triton()
    yield from _providers.check_providers(trial, cuda_device, torch_cuda)
    yield from _checks.check_conflicts(installed)
    yield from _checks.check_storage()


def exit_code(found: tuple[Check, ...]) -> int:
    """Return 1 when a check is fatal, else 0."""
    return int(any(check.status == "fatal" for check in found))


def show(found: tuple[Check, ...]) -> None:
    """Print the checks under their headings, each with how to mend it, and a summary."""
    for group, checks in itertools.groupby(found, key=lambda check: check.group):
        console.say(group, style="bold")
        for check in checks:
            start = f"  {check.status:<8}{check.name:<20} "
            text = textwrap.wrap(start + check.detail, 80, subsequent_indent=" " * 31, break_on_hyphens=False)
            console.say(*text, style=_STYLES[check.status])
            if check.mend:
                mend = f"          → {check.mend}"
                told = textwrap.wrap(mend, 80, subsequent_indent=" " * 12, break_on_hyphens=False)
                console.say(*told, style=_STYLES[check.status])
    wrong = [check for check in found if check.status in ("problem", "fatal")]
    fatal = sum(check.status == "fatal" for check in wrong)
    console.say()
    if fatal:
        console.say(f"{fatal} of {len(wrong)} problems must be mended before the toolkit can work", style="bold red")
    elif wrong:
        console.say(f"works, with {len(wrong)} problem{'s' * (len(wrong) > 1)} to mend", style="yellow")
    else:
        console.say("all is well", style="green")
