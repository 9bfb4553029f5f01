"""``vtk tasks push`` and ``pull``: packs on the Hugging Face hub."""

import os

from vtk import console
from vtk.commands import _cli
from vtk.errors import UsageError
from vtk.packs.config import PullConfig, PushConfig

HELP = {
    "push": "upload a pack to the Hugging Face hub, with a model card",
    "pull": "download a pack from the Hugging Face hub",
}


def run(name: str, argv: list[str]) -> int:
    """Run one of the commands of `HELP`."""
    return {"push": _push, "pull": _pull}[name](argv)


def _push(argv: list[str]) -> int:
    config = _cli.parse(
        PushConfig, argv, prog="vtk tasks push", description=HELP["push"], positional=("pack", "repo_id"),
        examples=("vtk tasks push runs/pets/task me/pets-vit", "vtk tasks push runs/pets me/pets-vit --with-base",
                  "vtk tasks push runs/pets me/pets-vit --format timm"),
    )  # fmt: skip
    token = _token(config.token_env)
    from vtk.packs.hub import push_task

    made = push_task(
        config.pack, config.repo_id, private=config.private, revision=config.revision, license=config.license,
        with_base=config.with_base, format=config.format, base=config.base, token=token,
    )  # fmt: skip
    total = sum(made.files.values())
    rows = [(name, console.size(size)) for name, size in made.files.items()]
    console.table(f"{made.repo_id}, {'private' if made.private else 'public'}", ("file", "size"), rows)
    console.say(f"pushed {console.size(total)} in commit {made.commit[:12]}: {made.url}")
    if config.license is None:
        console.say("its model card names no license; `--license` sets it")
    console.emit_json({
        "repo_id": made.repo_id, "url": made.url, "commit": made.commit, "bytes": total, "files": made.files,
        "private": made.private,
    })  # fmt: skip
    return 0


def _pull(argv: list[str]) -> int:
    config = _cli.parse(
        PullConfig, argv, prog="vtk tasks pull", description=HELP["pull"], positional=("repo_id",),
        examples=("vtk tasks pull me/pets-vit", "vtk tasks pull me/pets-vit --revision v1 --out runs/pets/task"),
    )  # fmt: skip
    token = _token(config.token_env)
    from vtk.packs.base_files import BUNDLED
    from vtk.packs.hub import pull_task

    got = pull_task(
        config.repo_id, config.out, revision=config.revision, overwrite=config.overwrite, token=token
    )  # fmt: skip
    card, total, bundled = got.card, sum(got.files.values()), BUNDLED in got.files
    top1 = card.metrics.get("top1")
    console.say(
        f"wrote {got.path} ({console.size(total)}): {card.model.name}, {card.input.height}×{card.input.width} px, "
        f"{len(card.classes)} classes"
        + ("" if top1 is None else f", top-1 {console.percent(top1)} on its own held-out images")
    )
    assert card.base is not None
    if not bundled:
        console.say(
            f"its base is {card.base.source}, id {card.base.id[:12]}; give --base FILE if it is not found automatically"
        )
    console.emit_json({
        "path": str(got.path), "bytes": total, "files": got.files, "model": card.model.name,
        "classes": list(card.classes), "top1": top1, "base": card.base.id, "bundled": bundled,
    })  # fmt: skip
    return 0


def _token(name: str | None) -> str | None:
    if name is None:
        return None
    if not (value := os.environ.get(name, "").strip()):
        # the value may be the token itself, so it is not printed
        raise UsageError("`--token-env` names no environment variable that is set; give its name, not the token")
    return value
