"""Makes the step rule of a run from its options: radius, micro-batches and adversary."""

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk.training.engine.processes import Ranks
from vtk.training.step_rules.adversarial import Adversary
from vtk.training.step_rules.radii import ADAPTIVE, Kind, find_radius
from vtk.training.step_rules.sam import Ascent


class SharpnessConfig(Protocol):
    """What this module reads of a config."""

    @property
    def sam(self) -> float | Literal["auto"] | None: ...  # noqa: D102
    @property
    def sam_adaptive(self) -> bool: ...  # noqa: D102
    @property
    def sam_m(self) -> int | None: ...  # noqa: D102
    @property
    def adversarial(self) -> float | None: ...  # noqa: D102
    @property
    def batch_size(self) -> int | Literal["auto"]: ...  # noqa: D102
    @property
    def accumulate(self) -> int: ...  # noqa: D102
    @property
    def mixup(self) -> float: ...  # noqa: D102
    @property
    def auto_augment(self) -> str | None: ...  # noqa: D102


def make_step_rule(
    config: SharpnessConfig, model: nn.Module, inputs: Sequence[InputSpec], ranks: Ranks, kind: Kind | None = None
) -> tuple[Ascent | None, str]:
    """Return the step rule of a run, and a line on it for people; None for a plain step.

    Args:
        config: its batch size is settled.
        model: of the run or, of several tasks, of the first: they are of one architecture.
        inputs: how the images of each stream are normalised.
        ranks: this process and the others.
        kind: of training, a column of the table; by default by the options.

    Raises:
        UsageError: the table has no radius for the model, or no group has as many images as ``sam_m``.
    """
    parts, adversary = [], None
    rho, most, together = None, None, False
    if config.sam is not None:
        rho, source = _radius(config, model, kind)
        most, together = _groups(config, model, ranks)
        parts.append(f"{'adaptive ' * config.sam_adaptive}SAM, ρ {rho:g}{source}")
    if config.adversarial is not None:
        adversary = Adversary(config.adversarial, inputs)
        parts.append(f"images against the model, by up to {config.adversarial:g}/255")
    if not parts:
        return None, ""
    rule = Ascent(rho, adaptive=config.sam_adaptive, most=most, together=together, adversary=adversary)
    return rule, f"{'; '.join(parts)}: every step runs its images twice"


def copies(config: SharpnessConfig) -> int:
    """Return how many fp32 numbers for each trained weight a step holds more than a plain one."""
    return (config.sam is not None) + (config.sam_m is not None)  # the weight itself; the gradients of earlier groups


def _radius(config: SharpnessConfig, model: nn.Module, kind: Kind | None) -> tuple[float, str]:
    if config.sam != "auto":
        assert config.sam is not None
        return float(config.sam), ""
    if kind is None:
        kind = "augmented" if config.mixup > 0 and config.auto_augment is not None else "supervised"
        kind = "adversarial" if config.adversarial is not None else kind
    rho, entry = find_radius(model, kind)
    if config.sam_adaptive:
        return rho * ADAPTIVE, f" ({ADAPTIVE:g} times the {rho:g} of {entry} in Chen et al. 2022)"
    return rho, f" ({entry} in Chen et al. 2022)"


def _groups(config: SharpnessConfig, model: nn.Module, ranks: Ranks) -> tuple[int | None, bool]:
    """Return how many images climb together, and whether those of all processes do."""
    images = config.sam_m
    if images is None:
        return None, False
    assert isinstance(config.batch_size, int)
    whole = config.batch_size * config.accumulate
    own = whole // ranks.world
    if images == 1 and any(isinstance(m, _BatchNorm) and _trains(m) for m in model.modules()):
        raise UsageError("`--sam-m` is 1, and one image has no statistics for the model's BatchNorm; give 2 or more")
    if images == whole:
        return None, ranks.world > 1
    if images > own:
        others = f" (a process's images of a step), or {whole} (all of the step's)" if ranks.world > 1 else ""
        raise UsageError(f"`--sam-m` is {images}; allowed is 1 to {own}{others or ', the images of a step'}")
    return images, False


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
