"""Merges the models of several tasks into one that gathers the weights of each image's task.

What is equal in all tasks stays as in timm's model: MLPs, norms, stem. The rest is stacked to (T, …), and the weights
of an image are gathered by its task number, so that a projection is one batched product
x (B, N, C) · W[task] (B, C, O). It reads each image's weights once more than a product with constant ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import RmsNorm
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.func import functional_call

from vtk.errors import UsageError

_LAYER_NORMS = (nn.LayerNorm,)
_RMS_NORMS = (RmsNorm, nn.RMSNorm)
_TABLES = ("pos_embed", "cls_token", "reg_token", "attn_pool.latent")
"""Parameters of shape (1, …) that timm adds to, or puts before, the tokens of each image."""


@dataclass
class _Current:
    """The task numbers of the current batch: (B,) int32, set for one forward pass."""

    task: Tensor | None = None

    def take(self, stack: Tensor) -> Tensor:
        """(T, …) → (B, …)."""
        assert self.task is not None
        return stack.index_select(0, self.task)


class GatheredLinear(nn.Module):
    """A linear layer with the weight and bias of each image's task.

    Args:
        layers: of the tasks, all of one input width; the narrower ones' outputs are filled up.
        current: tells the tasks of the batch.

    Attributes:
        weight: (T, in, out), 0 in columns that a task does not have.
        bias: (T, out), the type's minimum there; None where no task has one and none is filled up.
    """

    def __init__(self, layers: Sequence[nn.Linear], current: _Current) -> None:
        super().__init__()
        self._current = current
        first = layers[0]
        width = max(layer.out_features for layer in layers)
        weight = first.weight.new_zeros(len(layers), first.in_features, width)
        bias = first.weight.new_full((len(layers), width), torch.finfo(first.weight.dtype).min)
        for i, layer in enumerate(layers):
            weight[i, :, : layer.out_features] = layer.weight.detach().t()
            bias[i, : layer.out_features] = 0 if layer.bias is None else layer.bias.detach()
        self.weight = nn.Parameter(weight, False)
        plain = all(layer.bias is None and layer.out_features == width for layer in layers)
        self.bias = None if plain else nn.Parameter(bias, False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, in) to (B, N, out), or (B, in) to (B, out)."""
        y = torch.bmm(x if x.ndim == 3 else x[:, None], self._current.take(self.weight))
        if self.bias is not None:
            y = y + self._current.take(self.bias)[:, None]
        return y if x.ndim == 3 else y[:, 0]


class GatheredNorm(nn.Module):
    """LayerNorm or RMSNorm over the last axis of (B, …, D) with the weight and bias of the image's task."""

    def __init__(self, norms: Sequence[nn.Module], current: _Current) -> None:
        super().__init__()
        self._current = current
        first: Any = norms[0]
        self.rms, self.eps = isinstance(first, _RMS_NORMS), first.eps
        stacks: dict[str, Any] = {}
        for name in ("weight", "bias"):
            parts = [getattr(norm, name, None) for norm in norms]
            held = [p.detach() for p in parts if p is not None]
            stacks[name] = nn.Parameter(torch.stack(held), False) if held else None
        self.weight, self.bias = stacks["weight"], stacks["bias"]

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, …, D) to the same shape."""
        size = x.shape[-1:]
        y = F.rms_norm(x, size, eps=self.eps) if self.rms else F.layer_norm(x, size, eps=self.eps)
        shape = (-1, *[1] * (x.ndim - 2), x.shape[-1])
        if self.weight is not None:
            y = y * self._current.take(self.weight).view(shape)
        return y if self.bias is None else y + self._current.take(self.bias).view(shape)


class GatheredViT(nn.Module):
    """Many tasks of one timm Vision Transformer.

    Attributes:
        model: timm's, of the first task, its task-own layers replaced.
        tables: stacks (T, …) of its task-own tables, under names without dots.
        counts: (T,) int32, the classes of each task.
    """

    counts: Tensor

    def __init__(self, models: Sequence[Any]) -> None:
        """Stack the weights in which ``models`` differ; the first one is changed and must not be used afterwards.

        Raises:
            UsageError: something differs that cannot be stacked, by name.
        """
        super().__init__()
        for model in models:
            join_biases(model)
        self.model: Any = models[0]
        self._current = _Current()
        self._names = {key: key.replace(".", "_") for key in _different(models)}
        counts = [len(model.head.weight) for model in models]
        self.register_buffer("counts", torch.tensor(counts, dtype=torch.int32), persistent=False)
        tables: dict[str, nn.Parameter] = {}
        for where in dict.fromkeys(key.rpartition(".")[0] for key in self._names if key not in _TABLES):
            self._replace(where, [model.get_submodule(where) for model in models])
        self._names = {key: name for key, name in self._names.items() if key in _TABLES}
        for key, name in self._names.items():
            parts = [model.get_parameter(key).detach() for model in models]
            if any(len(part) != 1 or part.shape != parts[0].shape for part in parts):
                raise _refusal(key, "its tables have different shapes")
            tables[name] = nn.Parameter(torch.cat(parts), False)
        self.tables = nn.ParameterDict(tables)
        self.eval()

    def forward(self, pixel_values: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
        """Run images of any tasks.

        Args:
            pixel_values: (B, 3, H, W), normalised.
            task: (B,) int32, the number of each image's task.

        Returns:
            Logits (B, classes of the largest task), the type's minimum behind a task's own; and each image's number of
            classes (B,) int32. A number that no task has gives NaN and 0 classes, whatever the runtime's Gather does.
        """
        known = (task >= 0) & (task < len(self.counts))
        self._current.task = torch.where(known, task, torch.zeros_like(task))
        try:
            tables = {key: self._current.take(self.tables[name]) for key, name in self._names.items()}
            logits = functional_call(self.model, tables, (pixel_values,)) if tables else self.model(pixel_values)
            logits = torch.where(known[:, None], logits, torch.full_like(logits, torch.nan))
            return logits, self._current.take(self.counts) * known.to(torch.int32)
        finally:
            self._current.task = None

    def _replace(self, where: str, modules: Sequence[nn.Module]) -> None:
        """Replace the layers that differ by a gathered one."""
        new: nn.Module
        if all(isinstance(m, nn.Linear) for m in modules):
            new = GatheredLinear(modules, self._current)  # type: ignore[arg-type]
        elif all(isinstance(m, _LAYER_NORMS) for m in modules) or all(isinstance(m, _RMS_NORMS) for m in modules):
            new = GatheredNorm(modules, self._current)
        else:
            raise _refusal(where or "the model", f"it is a {type(modules[0]).__name__}")
        parent, _, leaf = where.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, new)


def join_biases(model: nn.Module) -> None:
    """Put the biases of q, k and v, which EVA-02, DINOv3 and BEiT keep beside their packed layer, into it, in place.

    They are then a task's own as those of other layers are; a bias apart is no layer that could be replaced.
    """
    for module in model.modules():
        attn: Any = module
        if type(module) in (EvaAttention, BeitAttention) and attn.qkv is not None and attn.q_bias is not None:
            packed = nn.Linear(attn.qkv.in_features, attn.qkv.out_features, bias=False, device="meta")
            packed.weight = attn.qkv.weight
            packed.bias = nn.Parameter(torch.cat([attn.q_bias, attn.k_bias, attn.v_bias]).detach(), False)
            attn.qkv = packed
            attn.q_bias = attn.k_bias = attn.v_bias = None


def _different(models: Sequence[nn.Module]) -> list[str]:
    """Return the names of parameters and buffers that are not the same in all models, in the first one's order.

    Raises:
        UsageError: a model has others than the first.
    """
    states = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    first = states[0]
    for state in states[1:]:
        if odd := sorted(first.keys() ^ state.keys()):
            raise _refusal(odd[0], "not every task has it")
    # the classifier is always a stack: it also fills up
    return [
        key
        for key, value in first.items()
        if key.startswith("head.") or any(not torch.equal(value, state[key]) for state in states[1:])
    ]


def _refusal(name: str, reason: str) -> UsageError:
    return UsageError(f"`{name}` differs between the tasks and cannot be stacked: {reason}; use --form files instead")
