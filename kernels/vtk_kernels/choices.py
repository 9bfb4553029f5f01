"""Which implementation of an operation is fastest: measured decisions, kept as data in ``choices.json``.

An entry holds for one device name, one minor version of torch and of Triton, one type and one shape:

    {"device": "NVIDIA H100 80GB HBM3", "torch": "2.14", "triton": "3.8", "op": "linear_gelu", "dtype": "bfloat16",
     "rows": 1576, "n": 3072, "k": 384, "choice": "triton"}

Between two measured numbers of rows the nearer one decides, at most a factor of 2 away. Where this device, torch and
Triton were not measured, what another version or a card of the same family said about the shape holds; nothing is
guessed for another n, k, type or family: the default of `DEFAULT` holds there.
"""

import functools
import importlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEFAULT = {
    "grouped_linear": "triton",
    "linear_gelu": "triton",
    "linear_residual": "whole",
    "ln_folded": "separate",
    "packed_attention": "sdpa",
    "splitk_linear": "aten",
}
"""Choice where nothing was measured."""

ALLOWED = {
    "grouped_linear": ("triton", "grouped_mm"),
    "linear_gelu": ("triton", "aten"),
    "linear_residual": ("whole", "finish"),
    "ln_folded": ("separate", "folded"),
    "packed_attention": ("sdpa", "triton"),
    "splitk_linear": ("aten", "triton", "finish"),
}
"""What an entry may choose; "aten" and "sdpa" are torch's own operators.

"ln_folded" is a whole block: norms as kernels of their own, or in the epilogues of its products (see `row_stats`).
"""

FIELDS = ("device", "torch", "triton", "op", "dtype", "rows", "n", "k")
"""What an entry is about; `read` refuses two entries about the same."""

FAMILIES = (("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200"),)
"""Beginnings of names of cards with the same multiprocessors, on which one measurement speaks for the others."""

_PATH = Path(__file__).with_name("choices.json")
_NEAR = 2.0

Entry = dict[str, Any]
_Rows = tuple[tuple[int, str], ...]


def choose(op: str, rows: int, n: int, k: int, dtype: torch.dtype, device_name: str | None) -> str:
    """Return what to call for an operation of this shape.

    Args:
        op: key of `DEFAULT`.
        rows: T of a linear layer or a block, B of packed_attention (all tokens are queries, 64 channels a head).
        n: F, output features; N, tokens of an image; C, channels of a block.
        k: K, input features; H, heads; hidden features of all branches of a block.
        dtype: of the operands.
        device_name: as `torch.cuda.get_device_name` says, see `device_name`; None for the default.

    Returns:
        One of ``ALLOWED[op]``.

    Raises:
        ValueError: an operation without a choice.
    """
    if op not in DEFAULT:
        raise ValueError(f"`op` ({op!r}) has no choice; these have: {', '.join(sorted(DEFAULT))}")
    return DEFAULT[op] if device_name is None else _choose(op, rows, n, k, dtype, device_name)


def device_name(x: Tensor) -> str | None:
    """Return the name of the card that holds ``x``, None for the CPU."""
    return _name(x.device.index) if x.is_cuda else None


def read(path: Path) -> list[Entry]:
    """Return the entries of a choice table.

    Raises:
        ValueError: not a table, an entry that says nothing this version knows, or two about the same.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["schema"] != 1:
            raise ValueError(f"schema {table['schema']}, this version reads 1")
        entries: list[Entry] = table["measured"]
        seen = set()
        for entry in entries:
            if entry["choice"] not in ALLOWED[entry["op"]]:
                raise ValueError(f"`choice` ({entry['choice']!r}) must be one of {ALLOWED[entry['op']]}: {entry}")
            seen.add(tuple(entry[field] for field in FIELDS))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no choice table: {type(error).__name__}: {error}") from error
    if len(seen) < len(entries):
        raise ValueError(f"{path.name} has two entries with the same {', '.join(FIELDS)}; keep the later measurement")
    return entries


@functools.lru_cache(maxsize=4096)
def _choose(op: str, rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> str:
    shape = (op, str(dtype).removeprefix("torch."), n, k)
    exact, related = _tables()
    for measured in (
        exact.get((device, _minor("torch"), _minor("triton"), *shape), ()),
        related.get((family(device), *shape), ()),
    ):
        near = [(abs(math.log(rows / r)), choice) for r, choice in measured if rows > 0]
        distance, choice = min(near, default=(math.inf, ""))
        if distance <= math.log(_NEAR) + 1e-9:
            return choice
    return DEFAULT[op]


def family(device: str) -> str:
    """Return one name for all cards of a family, the card's own where it has none."""
    return next((names[0] for names in FAMILIES if device.startswith(names)), device)


@functools.cache
def _tables() -> tuple[dict[tuple[Any, ...], _Rows], dict[tuple[Any, ...], _Rows]]:
    """Return the entries by device, versions and shape, and by family and shape (there the newest versions' only)."""
    exact: dict[tuple[Any, ...], _Rows] = {}
    newest: dict[tuple[Any, ...], dict[int, tuple[tuple[int, ...], str]]] = {}
    for entry in read(_PATH):
        shape = (entry["op"], entry["dtype"], entry["n"], entry["k"])
        key = (entry["device"], entry["torch"], entry["triton"], *shape)
        exact[key] = (*exact.get(key, ()), (entry["rows"], entry["choice"]))
        versions = tuple(int(part) for v in (entry["torch"], entry["triton"]) for part in v.split("."))
        found = newest.setdefault((family(entry["device"]), *shape), {})
        if versions >= found.get(entry["rows"], ((), ""))[0]:
            found[entry["rows"]] = versions, entry["choice"]
    related = {key: tuple((rows, choice) for rows, (_, choice) in rows_of.items()) for key, rows_of in newest.items()}
    return exact, related


@functools.cache
def _minor(module: str) -> str | None:
    try:
        return ".".join(importlib.import_module(module).__version__.split(".")[:2])
    except Exception:  # Triton is absent or broken: no entry is about None
        return None


@functools.cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)
