"""``--pack-rank``: at the end of a run, a compressed copy of its best pack beside it."""

from pathlib import Path

from vtk import console
from vtk.errors import VtkError
from vtk.models.devices import DTYPES
from vtk.packs.cards import pack_bytes
from vtk.packs.compression.compress import compress
from vtk.packs.compression.held_out import HeldOut, TrainingImages
from vtk.packs.compression.report import describe, print_lines
from vtk.packs.compression.write import Images, write_compressed
from vtk.packs.config import CompressConfig
from vtk.packs.load import load_task
from vtk.training.runs.prepare import PreparedTask
from vtk.training.runs.scoring import default_workers


def write_small(prepared: PreparedTask, pack: Path, out: Path) -> bool:
    """Compress a run's best pack with the run's own images, and return whether that could be done.

    What cannot be done is a warning: the run itself is complete.

    Args:
        prepared: the task, with ``pack_rank`` among its options.
        pack: of the best epoch.
        out: folder to write; replaced.
    """
    config, plan, audit = prepared.config, prepared.task.plan, prepared.task.audit
    assert config.pack_rank is not None
    device, precision = plan.ranks.device, plan.precision.name
    workers = default_workers(config.workers)
    try:
        options = CompressConfig(
            pack=pack, out=out, rank=config.pack_rank, data=config.data, seed=config.seed,
            pack_dtype="int8" if config.pack_dtype == "int8" else "bf16",
        )  # fmt: skip
        task = load_task(pack)
        held = HeldOut(
            task.card, audit.val, audit.digests, f"held-out images of {config.data}", device=device,
            dtype=DTYPES[precision], batch_size=config.eval_batch_size, workers=workers, seed=config.seed,
        )  # fmt: skip
        what = f"training images of {config.data}"
        training = TrainingImages(task.card, audit.train, what, device=device, workers=workers, seed=config.seed)
        found = compress(task, options, held=held, training=training, device=device)
        ran = f"{precision} on {device.type}, {config.eval_batch_size} images per pass"
        images = Images(held.what, what, same=True, conditions=ran)
        card = write_compressed(out, found, options, images, plan.command)
    except VtkError as error:
        console.warn(f"`--pack-rank` {config.pack_rank}: {out} was not written: {error}")
        return False
    print_lines(describe(found, options, images, card, pack_bytes(pack), pack_bytes(out)))
    return True
