"""Optimiser and learning rate: timm's parameter groups, a factor for the head, cosine with warm-up."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from vtk.models.parts import head_names, position_names


class OptimConfig(Protocol):
    """What this module reads of a config."""

    @property
    def optimizer(self) -> str: ...  # noqa: D102
    @property
    def lr(self) -> float: ...  # noqa: D102
    @property
    def head_lr_mult(self) -> float: ...  # noqa: D102
    @property
    def weight_decay(self) -> float: ...  # noqa: D102
    @property
    def momentum(self) -> float: ...  # noqa: D102
    @property
    def min_lr(self) -> float: ...  # noqa: D102
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

    Biases, other 1-D tensors, position tables and what timm's model itself names in ``no_weight_decay`` do not decay;
    frozen parameters are in no group. The head's groups have ``lr * head_lr_mult``.
    """
    heads = head_names(model)
    still: Collection[str] = position_names(model)
    if own := getattr(model, "no_weight_decay", None):
        still = {*still, *own()}
    groups = []
    for in_head, lr in ((False, config.lr), (True, config.lr * config.head_lr_mult)):
        part = {n: p for n, p in model.named_parameters() if p.requires_grad and (n in heads) == in_head}
        for group in param_groups_weight_decay(_Named(part), config.weight_decay, no_weight_decay_list=still):
            groups.append({**group, "lr": lr})
    return groups


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return timm's AdamW, or SGD with Nesterov momentum, over the trainable parameters."""
    groups = parameter_groups(model, config)
    return create_optimizer_v2(groups, opt=config.optimizer, lr=config.lr, weight_decay=0.0, momentum=config.momentum)


def lr_factor(step: int, total: int, warmup: float, floor: float) -> float:
    """Return the factor on the learning rate of step ``step`` (from 0) of ``total``.

    It rises linearly over the first ``warmup`` share of the steps, reaching 1 in the last of them, and then falls as
    half a cosine towards ``floor``.
    """
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    position = min(1.0, (step - rising) / max(1, total - rising))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * position))


def make_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, total: int) -> LambdaLR:
    """Return a schedule that is stepped once per optimiser step, ``total`` times in all."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, total, config.warmup, config.min_lr))
