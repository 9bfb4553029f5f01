"""``vtk tasks compress``."""

from vtk import console
from vtk.commands import _cli
from vtk.packs.config import CompressConfig

HELP = {"compress": "store a pack's changes as low-rank factors of about a megabyte; a lossy copy, measured"}

_DESCRIPTION = """Store the changes of a pack's matrices as low-rank factors; what is lost is measured and printed.

The changes are cut by singular values. One threshold divides the ranks over all matrices. With --data, training images
weigh the components by the gradients of the logits, and the pack is compared with the full one on held-out images.
--rank auto finds the smallest pack within --max-drop on one half of these, and the other half judges it, with a 95 %
interval. Classifier, biases, norms and prefix tokens stay exact; position tables become factors, too."""


def run(name: str, argv: list[str]) -> int:
    """Run ``compress``."""
    config = _cli.parse(
        CompressConfig, argv, prog=f"vtk tasks {name}", description=_DESCRIPTION, positional=("pack",),
        examples=(
            "vtk tasks compress runs/pets/task --data data/pets --out pets-small",
            "vtk tasks compress runs/pets/task --data data/pets --tune 200 --pack-dtype int8 --out pets-small",
            "vtk tasks compress runs/pets/task --rank 16 --out pets-16",
        ),
    )  # fmt: skip
    from vtk.runtime.compression import compress_task

    console.emit_json(compress_task(config).to_dict())
    return 0
