"""A model of many tasks whose own weights are inputs: low-rank factors, gathered for each image by its task.

The base's weights are constants. A layer that tasks changed computes x·Wᵀ + (x·a)·b with the a and b of the image's
task, two thin products beside the wide one, which all images share.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vtk_export.tasks.factor_layout import COUNTS, Layout


class _Rows:
    """The rows of the images of the current call, by the name of their stack: (B, …) fp32."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}


class FactorLinear(nn.Module):
    """A linear layer with the low-rank change, and the bias, of each image's task.

    Args:
        layer: of the base.
        name: of it in the model.
        stacks: names of all stacks; of those of this layer, ``a`` and ``b`` and the bias may be absent.
        rows: of the current call.
    """

    def __init__(self, layer: nn.Linear, name: str, stacks: frozenset[str], rows: _Rows) -> None:
        super().__init__()
        self._name, self._rows = name, rows
        self._changed, self._shifted = f"{name}.a" in stacks, f"{name}.bias" in stacks
        self.weight = layer.weight
        self.bias = None if self._shifted else layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, …, in) to (B, …, out)."""
        rows, name = self._rows.of, self._name
        flat = x.flatten(1, -2) if x.ndim > 2 else x[:, None]
        if not self._changed:
            y = F.linear(flat, self.weight, self.bias)
            if self._shifted:
                y = y + rows[f"{name}.bias"][:, None]
        else:
            z, b = torch.bmm(flat, rows[f"{name}.a"]), rows[f"{name}.b"]
            if self._shifted:  # a bias is one more component, which saves a pass over the output
                z = torch.cat((z, torch.ones_like(z[..., :1])), -1)
                b = torch.cat((b, rows[f"{name}.bias"][:, None]), 1)
            change = torch.bmm(z, b)
            # the wide product adds to the thin one: one Gemm, in place of a product and a sum
            y = torch.addmm(change.flatten(0, 1), flat.flatten(0, 1), self.weight.t()).view_as(change)
            if self.bias is not None:
                y = y + self.bias
        return y.view(*x.shape[:-1], y.shape[-1])


class FactorNorm(nn.Module):
    """LayerNorm or RMSNorm over the last axis of (B, …, D) with the weight and bias of each image's task."""

    def __init__(self, norm: Any, name: str, rows: _Rows) -> None:
        super().__init__()
        self._name, self._rows = name, rows
        self.rms, self.eps = not isinstance(norm, nn.LayerNorm), norm.eps
        self._parts = [part for part in ("weight", "bias") if getattr(norm, part, None) is not None]

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, …, D) to the same shape."""
        size, rows = x.shape[-1:], self._rows.of
        y = F.rms_norm(x, size, eps=self.eps) if self.rms else F.layer_norm(x, size, eps=self.eps)
        shape = (-1, *[1] * (x.ndim - 2), x.shape[-1])
        for part in self._parts:
            value = rows[f"{self._name}.{part}"].view(shape)
            y = y * value if part == "weight" else y + value
        return y


class FactorHead(nn.Module):
    """The classifier of each image's task, exact: (B, C) to (B, classes of the largest task)."""

    def __init__(self, name: str, rows: _Rows) -> None:
        super().__init__()
        self._name, self._rows = name, rows

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C) to (B, classes)."""
        rows = self._rows.of
        return torch.bmm(x[:, None], rows[f"{self._name}.weight"])[:, 0] + rows[f"{self._name}.bias"]


class FactorViT(nn.Module):
    """Any tasks of one timm Vision Transformer.

    Attributes:
        model: timm's, with the base's weights; the layers that tasks changed are replaced.
        layout: of the stacks.
    """

    def __init__(self, start: Any, layout: Layout) -> None:
        """Take a model as created from the base; it is changed and must not be used afterwards."""
        super().__init__()
        self.model: Any = start
        self.layout = layout
        self._rows = _Rows()
        for where in layout.layers:
            layer = start.get_submodule(where)
            linear = isinstance(layer, nn.Linear)
            new = (
                FactorLinear(layer, where, layout.names, self._rows) if linear else FactorNorm(layer, where, self._rows)
            )
            self._replace(where, new)
        for head in layout.heads:
            self._replace(head, FactorHead(head, self._rows))
        self.eval()

    def forward(self, pixel_values: Tensor, task: Tensor, stacks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run images of any tasks.

        Args:
            pixel_values: (B, 3, H, W), normalised.
            task: (B,) int32, the number of each image's task.
            stacks: in the order of the layout.

        Returns:
            Logits (B, classes of the largest task), the lowest fp32 number behind a task's own; and each image's number
            of classes (B,) int32. A number that no task has gives NaN and 0, whatever the runtime's Gather does.
        """
        given = dict(zip((stack.name for stack in self.layout.stacks), stacks, strict=True))
        counts = given.pop(COUNTS)
        inside = (task >= 0) & (task < counts.shape[0])
        slot = torch.where(inside, task, torch.zeros_like(task))
        count = counts.index_select(0, slot) * inside.to(torch.int32)
        dtype = pixel_values.dtype
        self._rows.of = {name: stack.index_select(0, slot).to(dtype) for name, stack in given.items()}
        try:
            tables = {key: self._rows.of[key] for key in self.layout.tokens}
            for key in self.layout.tables:
                change = torch.bmm(self._rows.of[f"{key}.b"], self._rows.of[f"{key}.a"])
                tables[key] = self.model.get_parameter(key) + change
            logits = functional_call(self.model, tables, (pixel_values,)) if tables else self.model(pixel_values)
            # an empty slot has 0 classes
            return torch.where((count > 0)[:, None], logits, torch.full_like(logits, torch.nan)), count
        finally:
            self._rows.of = {}

    def _replace(self, where: str, new: nn.Module) -> None:
        parent, _, leaf = where.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, new)
