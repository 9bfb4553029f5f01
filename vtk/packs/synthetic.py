"""Writes packs of random low-rank factors on a base, to measure and test many tasks without training them.

Such a pack is valid in every way: its matrices of attention and its position tables are random changes of low rank, its
biases, tokens and classifiers random numbers near the base's. Only what it has learned is missing.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk.card import FACTORS_SCHEMA, FIRST_SCHEMA, Card
from vtk.errors import UsageError
from vtk.files import replace_dir
from vtk.models.create import Created, build_model
from vtk.models.inputs import pair
from vtk.models.task_parameters import head_names, position_names
from vtk.packs.factors import FactorDtype, Factors
from vtk.packs.load import Task, load_task
from vtk.packs.pack import write_pack
from vtk.packs.rounding import start_hashes, start_layout, store_factors

_ATTENTION = re.compile(r"(.*\.)?attn\..+")
"""Names of what ``--train attn`` trains in timm's families of plain Vision Transformers, beside positions and heads."""

_STEP = 0.1
"""Standard deviation of a change, in units of that of the tensor's own values."""


def write_synthetic(
    folder: str | Path,
    base_or_pack: str | Path | Task | Created,
    *,
    rank: int | Sequence[int] = 16,
    classes: int | None = None,
    size: int | tuple[int, int] | None = None,
    dtype: FactorDtype = "fp32",
    seed: int = 0,
) -> Path:
    """Write one pack; of many, give what `synthetic_start` returns, which is built once.

    Args:
        folder: of the pack; replaced.
        base_or_pack: a pack, as its folder or loaded, whose model, base and trained tensors are taken; or a model as
            `vtk.models.create.build_model` creates it, of which attention, positions and heads count as trained.
        rank: of every matrix, or ranks of the matrices in turn; a matrix that has no such rank gets its full one.
        classes: of the task; by default those of ``base_or_pack``.
        size: of the images in pixels, height first; by default that of ``base_or_pack``.
        dtype: of the factors.
        seed: of all random numbers.

    Returns:
        The folder.

    Raises:
        UsageError: a bundle, whose base is not whole, an unsupported size, or ranks that are no numbers from 0 on.
        BaseError, DataError: the pack has no base here, or is damaged; the folder cannot be written.
    """
    created, trained = _start(base_or_pack, classes, size)
    ranks = tuple(rank) if isinstance(rank, list | tuple) else (rank,)
    if not ranks or not all(type(r) is int and r >= 0 for r in ranks):
        raise UsageError(f"`rank` is {rank!r:.80}; give a number from 0 on, or several")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    factors: dict[str, Factors] = {}
    matrices = _matrices(created)
    for name, value in created.model.state_dict().items():
        if name in trained and name in matrices:
            factors[name] = _random_factors(value, ranks[len(factors) % len(ranks)], generator)
        elif name in trained:
            tensors[name] = _moved(value, generator)
    stored, facts = store_factors(
        tensors, dtype, factors, trained=trained, starts=start_hashes(factors, created), spec=created.input
    )
    if factors and (layout := start_layout(created.base)):
        facts["start_layout"] = layout
    card = Card(
        created.spec, created.input, tuple(f"class {i}" for i in range(_class_count(created))), created.base.ref,
        created.transforms, schema=FACTORS_SCHEMA if factors else FIRST_SCHEMA, pack=facts,
    )  # fmt: skip
    with replace_dir(path := Path(folder)) as tmp:
        write_pack(tmp, stored, created.base.hashes, card)
    return path


def synthetic_start(
    base_or_pack: str | Path | Task | Created, *, classes: int | None = None, size: int | tuple[int, int] | None = None
) -> Created:
    """Return the model that synthetic packs start from, for many of them; arguments as of `write_synthetic`.

    Raises:
        UsageError, BaseError, DataError: as `write_synthetic`.
    """
    return _start(base_or_pack, classes, size)[0]


def _start(
    given: str | Path | Task | Created, classes: int | None, size: int | tuple[int, int] | None
) -> tuple[Created, frozenset[str]]:
    """Return the model as created from its base, and the names of what counts as trained."""
    if classes is not None and classes < 1:
        raise UsageError(f"`classes` is {classes}; a task has 1 or more")
    sides = None if size is None else pair(size)
    task = load_task(given) if isinstance(given, str | Path) else given if isinstance(given, Task) else None
    if task is not None:
        if task.base is None or task.bundled:
            raise UsageError(
                f"{task.path} is a {'bundle' if task.base else 'merged checkpoint'}, which does not have a whole base; "
                "give a pack and its base"
            )
        created = None
        spec, base, transforms, wanted = task.card.model, task.base, task.card.transforms, task.card.input
    else:
        assert isinstance(given, Created)
        created = given
        spec, base, transforms, wanted = given.spec, given.base, given.transforms, given.input
    count = classes or (len(task.card.classes) if task is not None else _class_count(given))
    if created is None or count != _class_count(created) or sides not in (None, created.input.size):
        if sides is not None:
            wanted = dataclasses.replace(wanted, height=sides[0], width=sides[1])
        created = build_model(
            spec.name, num_classes=count, img_size=wanted.size, in_chans=wanted.in_chans, transforms=transforms,
            kwargs=spec.kwargs, input=wanted, base=base,
        )  # fmt: skip
    own = head_names(created.model) | position_names(created.model) | created.initial.keys()
    state = created.model.state_dict()
    if task is not None:
        return created, own | (task.carried & state.keys())
    return created, own | {name for name in state if _ATTENTION.fullmatch(name)}


def _class_count(created: Any) -> int:
    count = int(getattr(created.model, "num_classes", 0))
    if count < 1:
        raise UsageError("this model has no classifier; give `classes`")
    return count


def _matrices(created: Created) -> frozenset[str]:
    """Return the names of matrices and position tables that the base has, so that a change of them means something."""
    model = created.model
    tables, heads = position_names(model), head_names(model)
    return frozenset(
        name
        for name, value in model.state_dict().items()
        if created.key_map.get(name) in created.base.tensors
        and name not in heads
        and value.is_floating_point()
        and (value.ndim >= 2 if name in tables else value.ndim == 2 and name.endswith(".weight"))
    )


def _random_factors(value: Tensor, rank: int, generator: torch.Generator) -> Factors:
    rows, columns = value[..., 0].numel(), value.shape[-1]
    rank = min(rank, rows, columns)
    each = (_STEP * _spread(value) / max(rank, 1) ** 0.5) ** 0.5
    a = each * torch.randn(rank, columns, generator=generator)
    return Factors(a, each * torch.randn(rows, rank, generator=generator))


def _moved(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    return value + _STEP * _spread(value) * torch.randn(value.shape, generator=generator)


def _spread(value: Tensor) -> float:
    spread = float(value.float().std()) if value.numel() > 1 else 0.0
    return spread or 1.0  # of biases that start at 0
