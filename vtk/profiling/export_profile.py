"""``--profile 1,8,32`` of an export: measures the exported file and writes the result beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtk import console

if TYPE_CHECKING:
    from vtk.profiling.inputs import Inputs
    from vtk.profiling.reference import Answers
    from vtk.runtime.source import Source
    from vtk_export.tasks.config import TasksCommand
    from vtk_export.tasks.export import TasksExportResult

SECONDS = 3.0
"""Of each cell, at most; `vtk profile` on the file takes longer and says more."""

STEM = "latency"


def onnx_backends(precision: str, *, engine: bool = False) -> tuple[str, ...]:
    """Return what runs an ONNX file here: ONNX Runtime on the CPU and on CUDA, and the engine that was built of it.

    Args:
        precision: of the file.
        engine: whether there is one.

    Raises:
        UnavailableError: bf16, for which ONNX Runtime has no arithmetic on a CPU, without CUDA.
    """
    from vtk.errors import UnavailableError
    from vtk.runtime.backends.base import check_backend

    found = () if precision == "bf16" else ("ort-cpu",)
    try:
        check_backend("ort-cuda")
        found = (*found, "ort-cuda")
    except UnavailableError as error:
        if not found:
            raise UnavailableError(
                f"`--profile` of a bf16 file needs CUDA ({error}); leave it out, and measure the file where it runs"
            ) from error
        console.say(f"latency on the CPU alone: {error}")
    return (*found, "tensorrt") if engine else found


def profile_onnx(
    path: Path,
    batches: Sequence[int],
    source: "Source",
    *,
    precision: str,
    threads: int | None,
    backends: tuple[str, ...] | None = None,
    shown: Path | None = None,
) -> tuple[int, dict[str, Any]]:
    """Measure an exported ONNX file.

    Args:
        path: of the file.
        batches: images per call.
        source: what it was exported from.
        precision: of the file.
        threads: CPU threads.
        backends: of `onnx_backends`, where it was asked before the export.
        shown: as of `profile_export`.

    Returns:
        As of `profile_export`.
    """
    chosen = onnx_backends(precision) if backends is None else backends
    return profile_export(
        path, batches, backends=chosen, precision=precision, threads=threads, reference=source, shown=shown
    )


def check_task_names(config: "TasksCommand") -> None:
    """Refuse names of tasks whose cards would be where another's latency goes.

    Raises:
        UsageError: names both.
    """
    from vtk.errors import UsageError
    from vtk_export.tasks.names import named_packs

    known = {name.casefold(): name for name in named_packs(config.packs)}
    for name in known:
        if other := known.get(f"{name}.{STEM}"):
            raise UsageError(
                f"`--profile` writes {known[name]}.{STEM}.json, which is the card of the task `{other}`; give it "
                "another name: NAME=PACK"
            )


def profile_tasks(result: "TasksExportResult", config: "TasksCommand") -> tuple[int, dict[str, Any]]:
    """Measure each file of an export of many tasks, the gathered one with all tasks in turn.

    Returns:
        The worst exit code, and what each file's ``NAME.latency.json`` holds, by NAME.
    """
    from vtk.runtime.opening import open_source
    from vtk_export.tasks.index import remember
    from vtk_export.tasks.names import named_packs

    packs, backends = named_packs(config.packs), onnx_backends("fp32")
    files: list[tuple[Path, Source | Answers]] = [
        (file.path, open_source(packs[file.name], base=config.base)) for file in result.files
    ]
    if result.gathered is not None:
        files.append((result.gathered, mixed_answers(packs, base=config.base)))
    code, found = 0, {}
    for path, reference in files:
        stem = f"{path.stem}.{STEM}"
        status, found[path.stem] = profile_export(
            path, config.profile, backends=backends, threads=config.threads, reference=reference, stem=stem
        )
        remember(result.path, [f"{stem}.json", f"{stem}.png"])
        code = max(code, status)
    return code, found


def mixed_answers(packs: Mapping[str, Path], *, base: Path | None = None) -> "Answers":
    """Return what computes logits (n, most classes), fp32, padded with the type's lowest number as the file's are.

    Args:
        packs: name to folder, in the order of the tasks' numbers.
        base: base weights of the packs, if they moved.
    """

    import torch

    from vtk.profiling.compare import torch_reference
    from vtk.profiling.reference import Reference
    from vtk.runtime.opening import open_source

    def answers(inputs: "Inputs") -> Reference:
        sources = [open_source(path, base=base) for path in packs.values()]
        most = max(len(source.card.classes) for source in sources)
        logits = torch.full((len(inputs.images), most), torch.finfo(torch.float32).min)
        for number, source in enumerate(sources):
            rows = (inputs.more["task"] == number).nonzero()[:, 0]
            if len(rows):
                logits[rows, : len(source.card.classes)] = torch_reference(source.model(), inputs.images[rows])
        return Reference(logits, "torch fp32 on the CPU, each image with its own task's model", "fp32")

    return answers


def profile_export(
    path: Path,
    batches: Sequence[int],
    *,
    backends: tuple[str, ...],
    device: str = "auto",
    precision: str = "fp32",
    threads: int | None = None,
    reference: "Source | Answers | None" = None,
    stem: str = STEM,
    shown: Path | None = None,
) -> tuple[int, dict[str, Any]]:
    """Measure an exported file and leave ``latency.json`` and ``latency.png`` beside it.

    Args:
        path: of the file.
        batches: images per call.
        backends: that run it.
        device: as of ``vtk profile``.
        precision: of the file.
        threads: CPU threads.
        reference: what its outputs are compared with; None for the file without graph optimisation.
        stem: of the two files' names.
        shown: where the file will be, if it is measured before it is put there.

    Returns:
        `vtk profile`'s exit code, and what is in ``latency.json``.
    """
    from vtk.files import write_bytes
    from vtk.filesets import recover, replace_set
    from vtk.formats import write_json
    from vtk.locks import hold_folder
    from vtk.marks import png
    from vtk.profiling.config import ProfileConfig
    from vtk.profiling.plot import latency_png
    from vtk.profiling.profile import run
    from vtk.profiling.report import MARKS, print_result
    from vtk.runtime.backends.base import load_backend
    from vtk.runtime.opening import open_source

    options: dict[str, Any] = {"precision": precision, "device": device, "threads": threads, "duration": SECONDS}
    config = ProfileConfig(batch_sizes=tuple(batches), backends=backends, **options)
    told = f"--profile of {path.name}"
    card = MARKS["profile.json"]
    marks = {f"{stem}.json": card, f"{stem}.png": png((f"{stem}.json", card))}
    with hold_folder(path.parent, f"vtk export {told}"):
        recover(path.parent)
        source = open_source(path, many=True)
        result = run(config, source, load_backend, name=str(path), reference=reference, command=told)
        print_result(result)
        found = result.to_dict()
        if shown is not None:
            found["source"] = str(shown)
        with replace_set(path.parent, marks, "vtk export --profile") as staged:
            write_json(staged / f"{stem}.json", found)
            write_bytes(staged / f"{stem}.png", latency_png(result))
    console.say(f"wrote {(shown or path).parent / f'{stem}.json'} and {stem}.png")
    return result.exit_code, found
