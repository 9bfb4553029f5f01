"""Checks whether a run can use the static step, and gives the reason where it cannot."""

from typing import Any, Protocol

import torch
from timm.optim import get_optimizer_info

from vtk.errors import UnavailableError, UsageError
from vtk.training.options.running import GraphChoice

KINDS = ("cuda",)
"""Devices whose steps are worth it: on a CPU nothing is gained by not looking."""

OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers whose fused form reads the learning rate, and whether to step at all, on the device."""


class GraphConfig(Protocol):
    """What this module reads of a config."""

    @property
    def cuda_graph(self) -> GraphChoice: ...  # noqa: D102
    @property
    def optimizer(self) -> str: ...  # noqa: D102
    @property
    def opt_kwargs(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def grad_checkpointing(self) -> bool: ...  # noqa: D102


def reason_against(
    config: GraphConfig, device: torch.device, world: int, *, precision: str, passes: int = 1, joint: bool = False,
    objective: Any = None,
) -> str | None:  # fmt: skip
    """Return why a run has no static step; None where it has one.

    Args:
        config: of the run.
        device: that trains.
        world: processes.
        precision: number format.
        passes: forward and backward passes of a step over the same images.
        joint: whether several tasks share a step.
        objective: what is minimised; None where that is not known yet.
    """
    if device.type not in KINDS:
        return f"the device is the {device.type}"
    if joint:
        return "the steps of several tasks hold other images each time"
    if world > 1:
        return f"{world} processes exchange gradients"
    if passes > 1:
        return "--sam and --adversarial draw the same random numbers twice"
    if config.grad_checkpointing:
        return "--grad-checkpointing stores the random generator's state"
    if precision == "fp16":
        return "--precision fp16 adapts the loss's factor on the host"
    if get_optimizer_info(config.optimizer).opt_class not in OPTIMIZERS:
        return f"--optimizer {config.optimizer} counts its steps on the host; adam, adamw and sgd do not"
    if any(word.partition("=")[0].strip() == "dampening" for word in config.opt_kwargs):
        return "--opt-kwargs dampening makes the first step another than the rest"
    if objective is not None and not getattr(objective, "static", False):
        return f"{type(objective).__name__} may look at numbers on the host"
    return None


def check_graph(
    config: GraphConfig, device: torch.device, world: int, *, precision: str, passes: int = 1, joint: bool = False
) -> None:
    """Refuse ``--cuda-graph on`` for a run that has no static step; see `reason_against` for the arguments.

    Raises:
        UnavailableError: it does not train on a GPU.
        UsageError: an option stands against it.
    """
    if config.cuda_graph != "on":
        return
    why = reason_against(config, device, world, precision=precision, passes=passes, joint=joint)
    if why is not None:
        kind = UsageError if device.type in KINDS else UnavailableError
        raise kind(f"`--cuda-graph` on: not possible, {why}; change that, or give --cuda-graph auto")
