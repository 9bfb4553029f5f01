"""``vtk tasks``: list, compare and merge task packs."""

import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

from vtk import console
from vtk.commands import _cli, _hub_tasks, _peft_tasks
from vtk.errors import DataError, UsageError
from vtk.packs.config import DiffConfig, ListConfig, MergeConfig

_HELP = {
    "list": "list the packs under folders: model, size, classes, accuracy, base, bytes, rank",
    "diff": "compare a pack with its base or with another pack",
    "merge": "merge base and pack into one checkpoint, or a folder that timm and transformers load",
    "bench": "measure several packs on one base against as many separate models",
    **_peft_tasks.HELP,
    **_hub_tasks.HELP,
}


def main(argv: list[str]) -> int:
    """Dispatch to one of the subcommands."""
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print("usage: vtk tasks COMMAND [OPTIONS]\n\nManage task packs.\n")
        for name, about in _HELP.items():
            print(textwrap.fill(about, 80, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12))
        return 0
    if argv[0] not in _HELP:
        raise UsageError(f"`vtk tasks {argv[0]}` is unknown; choose one of: {', '.join(_HELP)}")
    for group in (_peft_tasks, _hub_tasks):
        if argv[0] in group.HELP:
            return group.run(argv[0], argv[1:])
    return getattr(sys.modules[__name__], f"run_{argv[0]}")(argv[1:])


def run_list(argv: list[str]) -> int:
    """List the packs under folders; damaged ones are named and skipped."""
    config = _cli.parse(
        ListConfig, argv, prog="vtk tasks list", description=_HELP["list"], positional=("folders",),
        examples=("vtk tasks list runs",),
    )  # fmt: skip
    from vtk.packs.cards import find_packs, pack_bytes, read_card
    from vtk.packs.factor_facts import drop_of, ranks_of

    rows, packs = [], []
    for folder in map(Path, config.folders):
        for path in find_packs(folder):
            try:
                card, size = read_card(path), pack_bytes(path)
                ranks = ranks_of(card, path)
            except DataError as error:
                console.warn(f"skipped: {error}")
                continue
            except OSError as error:
                console.warn(f"skipped: {path}: {error.strerror or error}")
                continue
            base = card.base.id[:8] if card.base else None
            top1, drop = card.metrics.get("top1"), drop_of(card)
            pixels = f"{card.input.height}×{card.input.width}"
            rows.append((path, card.model.name, pixels, len(card.classes),
                         None if top1 is None else console.percent(top1), base, console.size(size),
                         ranks, None if drop is None else f"{100 * drop:.2f}"))  # fmt: skip
            packs.append({"path": str(path), "model": card.model.name, "height": card.input.height,
                          "width": card.input.width, "classes": len(card.classes), "top1": top1,
                          "base": card.base.id if card.base else None, "pack_bytes": size,
                          "rank": None if ranks is None else asdict(ranks), "drop": drop})  # fmt: skip
    if not packs:
        console.say(f"no packs under {', '.join(config.folders)}; `vtk finetune` writes them")
    else:
        columns = ("pack", "model", "px", "classes", "top-1", "base", "size", "rank", "drop in points")
        shown = len(columns) if any(pack["rank"] for pack in packs) else -2  # most folders have no such packs
        console.table(f"{len(packs)} packs", columns[:shown], [row[:shown] for row in rows], left=(0, 1, 5))
    console.emit_json({"packs": packs})
    return 0


def run_diff(argv: list[str]) -> int:
    """Show how far each part of a model moved."""
    config = _cli.parse(
        DiffConfig, argv, prog="vtk tasks diff", description=_HELP["diff"], positional=("pack", "other"),
        examples=("vtk tasks diff runs/pets/task", "vtk tasks diff runs/pets/task runs/cars/task"),
    )  # fmt: skip
    from vtk.packs.diff import diff_task

    diff = diff_task(config.pack, config.other, base=config.base)
    against = config.other or "its base"
    rows = [
        (c.part, f"{c.tensors}/{c.total}", console.percent(c.relative, 3), c.shape_differs or "") for c in diff.changes
    ]
    console.table(f"{config.pack} against {against}", ("part", "differ", "change ‖a−b‖/‖b‖", "other shape"), rows)
    console.say(
        f"identical: {console.size(diff.shared_bytes)} of {console.size(diff.total_bytes)}; "
        f"FFN tensors {diff.shared_ffn} of {diff.total_ffn}"
    )
    console.emit_json({
        "shared_bytes": diff.shared_bytes, "total_bytes": diff.total_bytes, "shared_ffn_tensors": diff.shared_ffn,
        "ffn_tensors": diff.total_ffn,
        "parts": [
            {"part": c.part, "differ": c.tensors, "tensors": c.total, "relative": c.relative} for c in diff.changes
        ],
    })  # fmt: skip
    return 0


def run_merge(argv: list[str]) -> int:
    """Merge base and pack into one checkpoint, or into a folder for timm and transformers."""
    config = _cli.parse(
        MergeConfig, argv, prog="vtk tasks merge", description=_HELP["merge"], positional=("pack",),
        examples=("vtk tasks merge runs/pets/task --out pets.safetensors",
                  "vtk tasks merge runs/pets/task --format timm --out pets-timm"),
    )  # fmt: skip
    if config.format != "file":
        return _merge_folder(config)
    from vtk.packs.checkpoint_readme import page_beside
    from vtk.packs.merge import merge_task
    from vtk.packs.plain import plain_call

    task = merge_task(config.pack, config.out, base=config.base, overwrite=config.overwrite)
    size = config.out.stat().st_size
    console.say(f"wrote {config.out} ({console.size(size)}) and {page_beside(config.out)}, which shows how to use it")
    try:
        code = plain_call(task.card).code(repr(str(config.out)))
        console.say("load it with plain timm:", *code.splitlines())
    except UsageError as error:
        code = None
        console.warn(f"plain timm cannot load it: {error}")
    console.emit_json({
        "path": str(config.out), "file_bytes": size, "classes": list(task.card.classes), "timm_code": code,
        "readme": str(page_beside(config.out)),
    })  # fmt: skip
    return 0


def run_bench(argv: list[str]) -> int:
    """Measure a bank of tasks against separate models."""
    from vtk.commands import _bench_tasks

    return _bench_tasks.run(argv, _HELP["bench"])


def _merge_folder(config: MergeConfig) -> int:
    """Write the folder and print how it is loaded."""
    from vtk.packs.merged_folder import merge_folder

    assert config.format != "file"
    task, form = merge_folder(config.pack, config.out, config.format, base=config.base, overwrite=config.overwrite)
    files = {file.name: file.stat().st_size for file in sorted(config.out.iterdir())}
    console.say(f"wrote {config.out} ({console.size(sum(files.values()))}); its README.md shows how to use it")
    if form.reason:
        console.say(f"no class of transformers' own ({form.reason}), so it is in timm's form, which transformers wraps")
    loads = []
    if not form.native:
        loads.append(f'timm.create_model("local-dir:{config.out}", pretrained=True)')
    loads.append(f'AutoModelForImageClassification.from_pretrained("{config.out}")')
    console.say("load it with:", *loads)
    if form.verified:
        console.say(f"loaded here by {' and '.join(form.verified)}: logits agree")
    if config.format == "hf" and "transformers" not in form.verified:
        console.warn("transformers is not installed here, so whether it loads the folder was not tried")
    console.emit_json({
        "path": str(config.out), "format": config.format, "native": form.native, "reason": form.reason,
        "verified": list(form.verified), "files": files, "classes": list(task.card.classes),
    })  # fmt: skip
    return 0
