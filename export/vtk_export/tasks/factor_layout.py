"""Lays out the stacks of a file of factors: which inputs its graph has beside images and tasks, and their shapes.

A stack holds one row for each task. Its axes are numbers, or names of axes whose size may differ between tasks: the
rank of a matrix's factors, and the number of classes. A row is padded to the largest task's size.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from timm.layers import RmsNorm
from torch import Tensor, nn

from vtk.card import Card
from vtk.errors import UsageError
from vtk.formats import to_json
from vtk.models.task_parameters import head_names

StackDtype = Literal["fp32", "fp16", "int32"]
TASKS, CLASSES, COUNTS = "tasks", "classes", "counts"
"""The first axis of every stack, the open axis of classifiers, and the stack of each task's number of classes."""
LOWEST = torch.finfo(torch.float32).min
"""In a bias behind the classes that a task has."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int32": torch.int32}
NORMS = (nn.LayerNorm, RmsNorm, nn.RMSNorm)
TABLES = ("pos_embed", "cls_token", "reg_token", "dist_token", "attn_pool.latent")
FACTORED_TABLES = ("pos_embed",)
"""Parameters of shape (1, rows, C) that timm adds to, or puts before, the tokens of each image."""


@dataclass(frozen=True)
class Stack:
    """One input of the graph.

    Attributes:
        name: of the input.
        axes: behind that of the tasks: sizes, or names of open axes.
        dtype: of its values; the graph computes in fp32.
        fill: what padding holds.
    """

    name: str
    axes: tuple[int | str, ...]
    dtype: StackDtype = "fp32"
    fill: float = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"name": self.name, "axes": list(self.axes), "dtype": self.dtype, "fill": self.fill}


@dataclass(frozen=True)
class Layout:
    """The stacks of a file, and what belongs to a task's row.

    Attributes:
        stacks: in the order of the graph's inputs.
        layers: names of layers of which each task has a part for itself.
        linears: those of them with low-rank changes of their weight.
        tables: names of parameters beside layers with low-rank changes.
        tokens: names of those that each task has for itself.
        vectors: names of biases and norms that each task has for itself.
        heads: names of the classifiers.
        origin: what tells files that fit from others, beside the stacks.
    """

    stacks: tuple[Stack, ...]
    layers: tuple[str, ...]
    linears: tuple[str, ...]
    tables: tuple[str, ...]
    tokens: tuple[str, ...]
    vectors: tuple[str, ...]
    heads: tuple[str, ...]
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Names of the stacks."""
        return frozenset(stack.name for stack in self.stacks)

    @property
    def factored(self) -> tuple[str, ...]:
        """Names of the parameters with low-rank changes."""
        return (*(f"{name}.weight" for name in self.linears), *self.tables)

    @property
    def digest(self) -> str:
        """What tells files of tasks that fit this graph: the stacks, the base, the model and its size."""
        text = to_json({"stacks": [stack.to_dict() for stack in self.stacks], **self.origin})
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def plan(
    start: nn.Module, factored: Collection[str], trained: Collection[str], dtype: StackDtype, origin: Mapping[str, Any]
) -> Layout:
    """Lay out the stacks for tasks of one model.

    Args:
        start: the model as created from the base.
        factored: names of parameters whose low-rank change some task has.
        trained: names of other tensors that differ from ``start`` in some task.
        dtype: of the factors.
        origin: what else tells files that fit from others.

    Raises:
        UsageError: something that can be no stack, by name.
    """
    heads = head_layers(start)
    if not heads or any(type(start.get_submodule(head)) is not nn.Linear for head in heads):
        raise _refusal("head", "it is no linear classifier")
    state: dict[str, Tensor] = {**dict(start.named_parameters()), **dict(start.named_buffers())}
    own = {key.rpartition(".")[0] for key in (*factored, *trained) if key not in TABLES}
    stacks: list[Stack] = []
    linears, tables, tokens, vectors = list[str](), list[str](), list[str](), list[str]()
    for key, value in state.items():
        where, _, leaf = key.rpartition(".")
        changed = key in factored or key in trained
        if where in heads:
            continue
        if key in TABLES:
            if key in factored:
                tables.append(key)
                stacks += _factors(key, value.shape[1], value.shape[2], dtype, table=True)
            elif changed:
                tokens.append(key)
                stacks.append(Stack(key, tuple(value.shape[1:])))
        elif where in own:
            layer = start.get_submodule(where)
            if type(layer) is nn.Linear and leaf == "weight":
                if key in factored:
                    linears.append(where)
                    stacks += _factors(where, value.shape[0], value.shape[1], dtype)
            elif type(layer) is nn.Linear or isinstance(layer, NORMS):
                vectors.append(key)
                stacks.append(Stack(key, tuple(value.shape)))
            elif changed:
                raise _refusal(key, f"it belongs to a {type(layer).__name__}")
    for head in heads:
        layer = start.get_submodule(head)
        assert isinstance(layer, nn.Linear)
        width = layer.in_features
        stacks += [Stack(f"{head}.weight", (width, CLASSES)), Stack(f"{head}.bias", (CLASSES,), fill=LOWEST)]
    stacks.append(Stack(COUNTS, (), "int32"))
    layers = dict.fromkeys([*linears, *(key.rpartition(".")[0] for key in vectors)])
    return Layout(
        tuple(stacks), tuple(layers), tuple(linears), tuple(tables), tuple(tokens), tuple(vectors), heads, origin
    )


def head_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's classifiers."""
    return tuple(dict.fromkeys(key.rpartition(".")[0] for key in sorted(head_names(model))))


def names_of(stacks: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the parameters that stacks stand for: those with low-rank changes, and others; classifiers among these."""
    factored, others = set[str](), set[str]()
    for name in stacks:
        start, _, end = name.rpartition(".")
        if end == "a":
            factored.add(start if start in TABLES else f"{start}.weight")
        elif end != "b" and name != COUNTS:
            others.add(name)
    return factored, others


def rank_axis(name: str) -> str:
    """Return the name of the open axis of a layer's or table's factors."""
    return f"rank_{name.replace('.', '_')}"


def _factors(name: str, rows: int, columns: int, dtype: StackDtype, *, table: bool = False) -> list[Stack]:
    """Return both factors of a matrix (rows, columns) as products read them: x · a · b, or b · a for a table."""
    rank = rank_axis(name)
    if table:
        return [Stack(f"{name}.b", (rows, rank), dtype), Stack(f"{name}.a", (rank, columns), dtype)]
    return [Stack(f"{name}.a", (columns, rank), dtype), Stack(f"{name}.b", (rank, rows), dtype)]


def examples(stacks: Sequence[Stack]) -> list[tuple[Tensor, dict[int, str]]]:
    """Return for each stack zeros to trace with, and the names of its open axes by number.

    No two open axes have the same size, lest a tracer should take them for one.
    """
    sizes: dict[str, int] = {TASKS: 3}
    found = []
    for stack in stacks:
        axes = (TASKS, *stack.axes)
        for axis in axes:
            if isinstance(axis, str):
                sizes.setdefault(axis, 3 + len(sizes))
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
        names = {i: axis for i, axis in enumerate(axes) if isinstance(axis, str)}
        found.append((torch.zeros(shape, dtype=DTYPES[stack.dtype]), names))
    return found


def origin_of(card: Card, start: nn.Module) -> dict[str, Any]:
    """Return what a file of factors belongs to: base, model, size, and a position table, which no base's id counts."""
    from vtk.models.weights.base import tensor_hash

    assert card.base is not None
    spec = card.input
    state = start.state_dict()
    return {
        "base": card.base.id,
        "model": {"name": card.model.name, "kwargs": card.model.kwargs},
        "transforms": [{"op": t.op, "args": t.args} for t in card.transforms],
        "size": [spec.in_chans, *spec.size],
        "tables": {key: tensor_hash(state[key]) for key in TABLES if key in state},
    }


def _refusal(name: str, reason: str) -> UsageError:
    return UsageError(f"`{name}` differs between the tasks and can be no stack: {reason}; use --form files instead")
