"""Chooses the memory mode and the batch size: the fastest mode, or the largest batch, that fits the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vtk import console
from vtk.errors import UsageError
from vtk.training.engine.optimizers import state_floats
from vtk.training.engine.precision import PrecisionName
from vtk.training.engine.processes import Ranks
from vtk.training.frozen_ffn.blocks import MemoryPlan, apply_memory_mode
from vtk.training.frozen_ffn.estimate import Footprint, footprints, join_footprints
from vtk.training.options.policy import MODES, MemoryMode, current_mode
from vtk.training.run_config import RunConfig
from vtk.training.step_rules.sharpness import copies

HEAD_ROOM = 0.1
"""Fraction of the free memory that a choice leaves free, for fragmentation."""

_FEW_STEPS = 10
"""Steps per epoch below which an automatic batch size gets a warning."""


@dataclass(frozen=True)
class Subject:
    """A model that a run trains.

    Attributes:
        model: still in fp32; its trained parameters require gradients.
        size: (channels, height, width) of its images.
    """

    model: nn.Module
    size: Sequence[int]


@dataclass(frozen=True)
class MemoryChoice:
    """Memory mode and batch size of a run.

    Attributes:
        mode: taken; ``plain`` where a mode changes nothing.
        batch: images per forward pass, all processes together; with several tasks, of each.
        world: processes.
        free: bytes on the device (the fullest, with several processes) for this run; its model counts as free.
        counted: bytes of each mode that was looked at; none where flags left nothing to choose.
        note: why blocks keep more than the mode says; None where none does.
    """

    mode: MemoryMode
    batch: int
    world: int
    free: int
    counted: tuple[Footprint, ...]
    note: str | None

    @property
    def each(self) -> int:
        """Images per process."""
        return math.ceil(self.batch / self.world)

    @property
    def line(self) -> str:
        """One line for people."""
        footprint = next((f for f in self.counted if f.mode == self.mode), None)
        if footprint is None:
            return f"memory mode {self.mode}, batch {self.batch}"
        needs, free = console.size(footprint.total(self.each)), console.size(self.free)
        return f"memory mode {self.mode}, batch {self.batch}: a step takes about {needs} of {free} free"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        modes = [
            {**f.to_dict(self.each), "headroom_bytes": self.free - f.total(self.each)} for f in self.counted
        ]  # fmt: skip
        taken = {"memory": self.mode, "batch_size": self.batch, "processes": self.world, "free_bytes": self.free}
        return {**taken, "note": self.note, "modes": modes}

    def print(self) -> None:
        """Print the table of the memory of each mode."""
        rows = []
        for f in self.counted:
            taken = "→ " if f.mode == self.mode else ""
            sizes = (f.activations(self.each), f.weights, f.gradients, f.optimizer, f.total(self.each))
            room = self.free - f.total(self.each)
            units = "–" if f.units is None else f"{f.units:.1f}"
            rows.append((taken + f.mode, _mb(f.image), units, *map(_mb, sizes), _mb(room)))
        title = f"Memory of a training step in MB (10⁶ bytes), batch {self.each}, {console.size(self.free)} free"
        columns = ("mode", "image", "units", "activ.", "weights", "grads", "optim.", "total", "room")
        console.table(title, columns, rows)
        console.say("image: kept for backward per image; units: per token and block, of C elements")
        formulas = [f.formula for f in self.counted if f.formula is not None]
        if formulas:
            derived = ", ".join(map(str, formulas))
            console.say(f"units derived: {derived}; ρ = {formulas[0].ratio:.3g}, the hidden width over C")
        console.say(self.line)


def choose_memory(
    subjects: Sequence[Subject], config: RunConfig, precision: PrecisionName, ranks: Ranks, *, images: int,
    saved: dict[str, Any] | None = None, count_all: bool = False,
) -> MemoryChoice:  # fmt: skip
    """Choose and apply a memory mode, and choose the batch size where it is ``auto``.

    Args:
        subjects: a model, or those of several tasks that share frozen parameters. Changed in place.
        config: ``memory`` and ``batch_size`` may be ``auto``.
        precision: number format of the run.
        ranks: all processes choose the same.
        images: in the (largest) training set, which a batch does not exceed.
        saved: flags of the run that is resumed; they settle what is ``auto`` now.
        count_all: count every mode, for the table.
    """
    saved = saved or {}
    model = subjects[0].model
    wanted = config.memory
    if wanted == "auto" and saved:
        wanted = current_mode(saved.get("memory", "plain"))
    elif wanted == "auto" and config.grad_checkpointing:
        wanted = "plain"  # nothing inside a block is kept anyway
    batch: int | str = config.batch_size
    if batch == "auto" and saved:
        batch = int(saved["batch_size"])
    plan = _apply(subjects, "minimal" if wanted == "auto" else wanted)
    counted: list[Footprint] = []
    free = 0
    mode: MemoryMode = "plain" if wanted == "auto" or not plan.effective else wanted
    if count_all or batch == "auto" or (wanted == "auto" and plan.effective):
        try:
            counted, free = _count(subjects, config, precision, ranks, MODES if plan.effective else MODES[:1])
        except Exception as error:  # a forward pass that torch cannot run on tensors without contents
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:90]}"
            if count_all or batch == "auto":
                raise UsageError(
                    f"the memory of {type(model).__name__} cannot be counted ({why}); give --batch-size and --memory"
                ) from error
            console.warn(f"the memory of {type(model).__name__} cannot be counted ({why}); --memory is plain")
    if batch == "auto":
        batch = _largest_batch(_leanest(counted, wanted), free, images, ranks.world)
        steps = math.ceil(images / (batch * config.accumulate))
        if steps < _FEW_STEPS and ranks.main:
            console.warn(
                f"`--batch-size auto` takes {batch} of {images} training images, so that an epoch has {steps} "
                f"step{'s' * (steps > 1)}; a smaller --batch-size learns more from small data"
            )
    each = math.ceil(int(batch) / ranks.world)
    if wanted == "auto" and counted:
        mode = _fastest(counted, each, free)
        if not any(_fits(f, each, free) for f in counted) and ranks.main:
            console.warn(
                f"a step on {batch} images takes about {console.size(counted[-1].total(each))} in mode {mode}, "
                f"{console.size(free)} are free; give a smaller --batch-size, or --batch-size auto"
            )
    if plan.note is not None and ranks.main:
        if wanted not in ("auto", "plain"):
            console.warn(plan.note)
        elif wanted == "auto" and config.train == "attn":
            console.warn(f"memory modes: {'; '.join(plan.reasons)}; these blocks train by torch's autograd")
    own = _apply(subjects, mode)
    if wanted == "auto" and config.train == "lora" and own.note is not None and ranks.main:
        console.warn(own.note)  # of the mode taken: minimal never does all it says for layers with factors
    return MemoryChoice(
        mode, int(batch), ranks.world, free, tuple(counted), own.note if wanted == "auto" else plan.note
    )  # fmt: skip


def free_bytes(device: torch.device) -> int:
    """Return the available bytes of ``device``: free ones, and those that torch caches."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)


def batch_sizes(most: int) -> list[int]:
    """Return the candidates of ``--batch-size auto``, ascending: 1, 2, 4, then powers of two and their 1.5-fold."""
    sizes = [n for power in range(3, 17) for n in (2**power, 3 * 2 ** (power - 1))]
    return [n for n in (1, 2, 4, *(n for n in sorted(sizes) if n % 8 == 0)) if n <= max(1, most)]


def _apply(subjects: Sequence[Subject], mode: MemoryMode) -> MemoryPlan:
    """Apply a mode to the models of all tasks, which are of one architecture."""
    plan, *_ = [apply_memory_mode(subject.model, mode) for subject in subjects]
    return plan


def _count(
    subjects: Sequence[Subject], config: RunConfig, precision: PrecisionName, ranks: Ranks,
    modes: Sequence[MemoryMode],
) -> tuple[list[Footprint], int]:  # fmt: skip
    free = free_bytes(ranks.device)
    if ranks.device.type == "cpu":
        free //= ranks.world
    tensors = {id(t): t for s in subjects for t in (*s.model.parameters(), *s.model.buffers())}
    free = min(ranks.gather(free + sum(t.nbytes for t in tensors.values() if t.device == ranks.device)))
    moments = state_floats(config.optimizer, config.opt_kwargs) + (config.ema is not None)
    moments += copies(config)
    to_images = config.adversarial is not None
    each = [footprints(s.model, s.size, precision, moments, modes, to_images=to_images) for s in subjects]
    wide = 4 if precision == "fp32" else 2
    first = {id(p) for p in subjects[0].model.parameters()}
    again = [wide * sum(p.numel() for p in s.model.parameters() if id(p) in first) for s in subjects]
    return [join_footprints(footprint, again) for footprint in zip(*each, strict=True)], free


def _fits(footprint: Footprint, batch: int, free: int) -> bool:
    return footprint.total(batch) <= (1 - HEAD_ROOM) * free


def _fastest(counted: Sequence[Footprint], batch: int, free: int) -> MemoryMode:
    return next((f.mode for f in counted if _fits(f, batch, free)), counted[-1].mode)


def _leanest(counted: Sequence[Footprint], wanted: str) -> Footprint:
    return next((f for f in counted if f.mode == wanted), counted[-1])


def _largest_batch(footprint: Footprint, free: int, images: int, world: int) -> int:
    """Return the largest batch of all processes that fits.

    Raises:
        UsageError: not even one image per process does.
    """
    fitting = [n for n in batch_sizes(images // world) if _fits(footprint, n, free)]
    if not fitting:
        raise UsageError(
            f"`--batch-size auto`: one image takes about {console.size(footprint.total(1))} in mode {footprint.mode}, "
            f"{console.size(free)} are free; use a smaller model or --img-size, or another --device"
        )
    return fitting[-1] * world


def _mb(n_bytes: float) -> str:
    """Format bytes in millions, in at most seven characters."""
    value = n_bytes / 1e6
    return f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"
