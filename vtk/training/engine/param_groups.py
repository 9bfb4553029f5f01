"""Optimizer and learning rate: timm's parameter groups, a factor for the head, cosine with warm-up."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from vtk.models.task_parameters import head_names, position_names
from vtk.training.engine.optimizers import create

DECAYS = "decays"
"""Key of a parameter group: whether it has weight decay, which may be 0 at first."""


class OptimConfig(Protocol):
    """What this module reads of a config."""

    @property
    def optimizer(self) -> str: ...  # noqa: D102
    @property
    def opt_kwargs(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def lr(self) -> float: ...  # noqa: D102
    @property
    def layer_decay(self) -> float | None: ...  # noqa: D102
    @property
    def head_lr_mult(self) -> float: ...  # noqa: D102
    @property
    def weight_decay(self) -> float: ...  # noqa: D102
    @property
    def momentum(self) -> float: ...  # noqa: D102
    @property
    def min_lr(self) -> float: ...  # noqa: D102
    @property
    def schedule(self) -> str: ...  # noqa: D102
    @property
    def warmup(self) -> float: ...  # noqa: D102


class _Named:
    """The part of a model's parameters that timm's grouping shall see."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._parameters.items())


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Split the trainable parameters by weight decay and by learning rate.

    Biases, other 1-D tensors, position tables, what timm's model itself names in ``no_weight_decay`` and a part of ours
    in ``undecayed`` do not decay; frozen parameters are in no group. The head's groups have ``lr * head_lr_mult``. With
    ``layer_decay`` d, what lies n layers below the last has ``lr * d ** n``, frozen layers counted (Clark et al. 2020,
    sec. 3.2; BEiT).
    """
    heads = head_names(model)
    still = set(position_names(model))
    if own := getattr(model, "no_weight_decay", None):
        still |= set(own())
    for prefix, module in model.named_modules():
        still |= {f"{prefix}.{name}" for name in getattr(module, "undecayed", ())}
    scales = layer_scales(model, config.layer_decay)
    parts: dict[tuple[bool, float], dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts.setdefault((name in heads, scales.get(name, 1.0)), {})[name] = parameter
    groups = []
    for (in_head, scale), part in sorted(parts.items(), key=lambda item: item[0]):
        lr = config.lr * scale * (config.head_lr_mult if in_head else 1.0)
        # 1 in place of a decay of 0, which may rise: timm says by it which group decays
        for group in param_groups_weight_decay(_Named(part), 1.0, no_weight_decay_list=still):
            decays = bool(group["weight_decay"])
            groups.append({**group, "weight_decay": config.weight_decay * decays, DECAYS: decays, "lr": lr})
    return groups


def layer_scales(model: nn.Module, decay: float | None) -> dict[str, float]:
    """Return the factor on the learning rate of every trainable parameter; none without ``decay``."""
    if decay is None:
        return {}
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=decay)
    return {names[id(p)]: float(group["lr_scale"]) for group in groups for p in group["params"]}


def describe_rates(model: nn.Module, config: OptimConfig) -> str:
    """Return the highest learning rates in one line: of the head, and of the layers from last to first.

    A weight decay that changes is in it, too.
    """
    heads = {id(p) for name, p in model.named_parameters() if name in head_names(model)}
    rates: dict[bool, set[float]] = {True: set(), False: set()}
    for group in parameter_groups(model, config):
        rates[id(group["params"][0]) in heads].add(float(group["lr"]))
    rate_texts = []
    if body := rates[False]:
        layers = f" in the last layer to {min(body):.3g} in the first trained" if len(body) > 1 else ""
        rate_texts.append(f"{max(body):.3g}{layers}")
    rate_texts += [f"{rate:.3g} in the head" for rate in sorted(rates[True])]
    end = getattr(config, "weight_decay_end", None)
    if end is not None and end != config.weight_decay:
        rate_texts.append(f"weight decay from {config.weight_decay:g} to {end:g}")
    return f"{config.optimizer}, learning rate up to {', '.join(rate_texts)}"


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return timm's optimizer of that name over the trainable parameters.

    Raises:
        UsageError: there is none, or this loop cannot drive it.
        UnavailableError: a package or device that it needs is not available.
    """
    return create(
        parameter_groups(model, config), config.optimizer, config.opt_kwargs, lr=config.lr, momentum=config.momentum
    )


def lr_factor(step: int, total: int, warmup: float, floor: float, schedule: str = "cosine") -> float:
    """Return the factor on the learning rate of step ``step`` (from 0) of ``total``.

    It rises linearly over the first ``warmup`` share of the steps, reaching 1 in the last of them, and then falls as
    half a cosine, or ``linear``, towards ``floor``; or by equal factors (``exponential``), which needs a floor above 0.
    """
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    position = min(1.0, (step - rising) / max(1, total - rising))
    if schedule == "exponential":
        return floor**position
    left = 1 - position if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * position))
    return floor + (1 - floor) * left


def make_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, total: int) -> LambdaLR:
    """Return a schedule that is stepped once per optimizer step, ``total`` times in all."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, total, config.warmup, config.min_lr, config.schedule))


class WeightDecay:
    """Weight decay that changes on half a cosine over the run (Caron et al. 2021: from 0.04 to 0.4).

    Args:
        optimizer: of groups as `parameter_groups` makes them.
        config: with ``weight_decay_end``; without, or None, the decay stays as it is.
        total: steps of the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimConfig, total: int) -> None:
        self.optimizer, self.total, self.start = optimizer, total, config.weight_decay
        self.end: float | None = getattr(config, "weight_decay_end", None)  # only pre-training has it
        self.groups = [i for i, group in enumerate(optimizer.param_groups) if group.get(DECAYS)]

    def set_at(self, step: int) -> None:
        """Set the decay of step ``step`` (from 0)."""
        if self.end is None:
            return
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.total)))
        for i in self.groups:  # by number: a resumed optimizer has other dictionaries
            self.optimizer.param_groups[i]["weight_decay"] = self.end + (self.start - self.end) * left
