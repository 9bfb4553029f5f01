"""``vtk data``: audit a folder of images before training."""

from vtk import console
from vtk.commands import _cli
from vtk.data.config import AuditCommand
from vtk.errors import UsageError

_HELP = {"audit": "decode every image once; report classes, split, bad files, anomalies"}

_TEXT = """Decode every image below a folder once, and report how `vtk finetune` would use it.

Reports classes and split, unreadable files with the reason, sizes and modes. --out FILE writes one self-contained HTML
page with thumbnails of anomalies and how each is handled. Results are cached: finetune and eval do not decode the
images again for their own audit."""


def main(argv: list[str]) -> int:
    """Dispatch to one of the subcommands."""
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print("usage: vtk data COMMAND [OPTIONS]\n\nAudit folders of images.\n")
        print("\n".join(f"  {name:<6} {text}" for name, text in _HELP.items()))
        return 0
    if argv[0] not in _HELP:
        raise UsageError(f"`vtk data {argv[0]}` is unknown; choose one of: {', '.join(_HELP)}")
    return run_audit(argv[1:])


def run_audit(argv: list[str]) -> int:
    """Scan, print and write the page; ``--on-bad-image fail`` then refuses bad images."""
    config = _cli.parse(
        AuditCommand, argv, prog="vtk data audit", description=_TEXT, positional=("data",),
        examples=(
            "vtk data audit data/pets --out audit.html", "vtk data audit data/pets --out pets.html --on-bad-image fail",
            "vtk data audit data/scenes/labels.csv --multi-label",
        ),
    )  # fmt: skip
    from vtk.data.audit.report import audit

    found = audit(config.data, config)
    if config.out is None and (found.odd or found.bad):
        console.say("--out audit.html writes a page with pictures of the anomalies")
    console.emit_json({**found.to_dict(), "page": None if config.out is None else str(config.out)})
    return 0
