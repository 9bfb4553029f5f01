"""Chooses the fastest implementation of an operation, from measured decisions kept as data.

An entry holds for one device name, one minor version of torch and of Triton, one type and one shape:

    {"device": "NVIDIA H100 80GB HBM3", "torch": "2.14", "triton": "3.8", "op": "linear_gelu", "dtype": "bfloat16",
     "rows": 1576, "n": 3072, "k": 384, "choice": "triton"}

The nearest entry decides. A shape that was not measured takes the choice of the measured shape nearest to it, at most
a factor of `REACH` away in what determines bytes and FLOPs (see `_nearest`; attention goes by images × heads): a
guess, which `explain` names. Entries of the other half type, of other versions and of cards of the same family count
too, each as if it were a factor of `OTHER` further away. Where nothing is within reach the default of `DEFAULT` holds.

Three tables are searched together, and of equally near entries the upper table's decides:

    the table that the environment variable VTK_CHOICES names, read at the first choice
    one tuned on this card, registered by `use`
    the package's own, ``choices.json``
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vtk_kernels import _choice_tables
from vtk_kernels._choice_tables import FIELDS, ChoiceTableError, Entry, Layers, Table
from vtk_kernels._nearest import OTHER, REACH, Candidate, candidate, nearest, pieces, quantities

__all__ = [
    "ALLOWED", "DEFAULT", "FAMILIES", "FIELDS", "OTHER", "REACH", "Answer", "ChoiceTableError", "Entry",
    "Question", "Table", "choose", "device_name", "explain", "family", "layers", "read", "record_questions", "text",
    "use",
]  # fmt: skip

DEFAULT = {
    "grouped_linear": "triton",
    "grouped_low_rank": "separate",
    "kept_attention": "flash",
    "linear_gelu": "triton",
    "linear_residual": "whole",
    "linear_swiglu": "triton",
    "ln_folded": "separate",
    "packed_attention": "sdpa",
    "residual": "separate",
    "rotary_attention": "triton",
    "splitk_linear": "aten",
}
"""Choice where nothing was measured: the form that ran right on a card.

A form that none has run waits for a measurement, which compares its results first: `gpu.sh`, or tuning on one's card.
"linear_swiglu" and "rotary_attention" do not: no card has run them yet, but beside the former stand three kernels that
write gate and value, and beside the latter a dozen of torch's, each over all queries and keys.
"""

ALLOWED = {
    "grouped_linear": ("triton", "grouped_mm"),
    "grouped_low_rank": ("separate", "epilogue"),
    "kept_attention": ("flash", "cudnn"),
    "linear_gelu": ("triton", "aten", "cublaslt"),
    "linear_residual": ("whole", "finish"),
    "linear_swiglu": ("triton", "aten"),
    "ln_folded": ("separate", "folded"),
    "packed_attention": ("sdpa", "triton", "short"),
    "residual": ("separate", "addmm"),
    "rotary_attention": ("triton", "sdpa"),
    "splitk_linear": ("aten", "triton", "finish"),
}
"""What an entry may choose; "aten" and "sdpa" are torch's own operators.

"cublaslt" is GELU in the epilogue of cuBLASLt's product, by tanh (`torch._addmm_activation`); "short" is attention over
all keys of an image at once, where there are few, else "triton". "residual" is a product of a block's end: added to the
residual stream by `add_norm`, or by the product itself, and biases by `norm`; the latter where it is chosen for all.
"grouped_low_rank" is a product with shared weights and each task's change of them: of the library, with the operation
of this name behind it, or `low_rank_linear`.

"ln_folded" is a whole block: norms as kernels of their own, or in the epilogues of its products (see `row_stats`).
"finish" is K in slices whose last program finishes its tile (`linear_residual`), "whole" one program for each tile. For
"splitk_linear" the former comes with `norm`, and "triton" and "aten" with `add_norm`.
"""

FAMILIES = (("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200"),)
"""Beginnings of names of cards with the same multiprocessors, on which one measurement speaks for the others."""

_HALF = {"bfloat16", "float16"}
_LAYERS = Layers(Path(__file__).with_name("choices.json"), ALLOWED)


_recorded: "list[Question] | None" = None


class Question(NamedTuple):
    """The arguments of `choose` that are no card."""

    op: str
    rows: int
    n: int
    k: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Answer:
    """What `choose` says, and why.

    Attributes:
        choice: one of ``ALLOWED[op]``.
        table: name of the table; None for the default.
        entry: that decided; None for the default.
        differs: in what the entry differs from the question: "shape", "type", "version", "card"; none if exact.
        work: factor between the work of both shapes, at least 1.
    """

    choice: str
    table: str | None = None
    entry: Entry | None = None
    differs: tuple[str, ...] = ()
    work: float = 1.0

    def __str__(self) -> str:
        if self.entry is None:
            return f"{self.choice}: the default, nothing near was measured"
        words = [f"other {name}" for name in self.differs if name != "shape"]
        if "shape" in self.differs:
            words.insert(0, f"nearest shape (work differs by {self.work:.2g}×)")
        at = "{rows} × {n} × {k}, {dtype}, {device}, torch {torch}, Triton {triton}".format(**self.entry)
        return f"{self.choice}: {', '.join(words) or 'measured'}: {at} ({self.table})"


def choose(op: str, rows: int, n: int, k: int, dtype: torch.dtype, device_name: str | None) -> str:
    """Return what to call for an operation of this shape.

    torch.compile follows it: what it compiles holds for all numbers of rows of the same choice, and for the tables as
    they were.

    Args:
        op: key of `DEFAULT`.
        rows: T of a linear layer or a block, B of packed_attention (all tokens are queries, 64 channels a head), of
            rotary_attention (the same with a rotary table) and of kept_attention (the same as the first, forward and
            backward together, where a run trains attention).
        n: F, output features, of gate and value together; N, tokens of an image; C, channels of a block.
        k: K, input features; H, heads; hidden features of all branches of a block.
        dtype: of the operands.
        device_name: as `torch.cuda.get_device_name` says, see `device_name`; None for the default.

    ``rows`` may be symbolic while something traces, ``n`` and ``k`` may not.

    Returns:
        One of ``ALLOWED[op]``.

    Raises:
        ValueError: an operation without a choice.
        ChoiceTableError: the table that VTK_CHOICES names cannot be used.
    """
    if op not in DEFAULT:
        raise ValueError(f"`op` ({op!r}) has no choice; these have: {', '.join(sorted(DEFAULT))}")
    if _recorded is not None:
        _recorded.append(Question(op, rows, n, k, dtype))
    if device_name is not None:
        for end, choice in _pieces(op, n, k, dtype, device_name):
            if rows < end:
                return choice
    return DEFAULT[op]


@contextlib.contextmanager
def record_questions() -> Iterator[list[Question]]:
    """Collect the questions to `choose`, from any thread, in order and with repetitions."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def explain(op: str, rows: int, n: int, k: int, dtype: torch.dtype, device_name: str | None) -> Answer:
    """Return what `choose` does, with the entry that decides. Same arguments and errors."""
    if op not in DEFAULT:
        raise ValueError(f"`op` ({op!r}) has no choice; these have: {', '.join(sorted(DEFAULT))}")
    found = None if device_name is None else nearest(_candidates(op, n, k, dtype, device_name), rows)
    if found is None:
        return Answer(DEFAULT[op])
    measured = tuple(found.entry[field] for field in ("rows", "n", "k"))
    (a, b), (c, d) = quantities(op, rows, n, k), quantities(op, *measured)
    differs = (*(("shape",) if measured != (rows, n, k) else ()), *found.differs)
    return Answer(found.entry["choice"], found.table, found.entry, differs, max(a * b / (c * d), c * d / (a * b)))


def device_name(x: Tensor) -> str | None:
    """Return the name of the card that holds ``x``; None for the CPU, and for a fake tensor where there is no card."""
    return _name(x.device.index or 0) if x.is_cuda else None


def family(device: str) -> str:
    """Return one name for all cards of a family, the card's own where it has none."""
    return next((names[0] for names in FAMILIES if device.startswith(names)), device)


def layers() -> tuple[Table, ...]:
    """Return the tables that are searched, the upper one first.

    Raises:
        ChoiceTableError: the table that VTK_CHOICES names cannot be used.
    """
    return _tables()


def use(table: str | os.PathLike[str] | Iterable[Entry] | None) -> None:
    """Register the table tuned on this card, in place of the one before; None for no such table.

    Choices are made anew from then on, and VTK_CHOICES is read anew. What was compiled or captured keeps its own.

    Args:
        table: entries, or the path of a table; they are read and checked here.

    Raises:
        ChoiceTableError: it cannot be used; the one before stays.
    """
    _LAYERS.register(table)
    for cache in (_tables, _candidates, _cached_pieces):
        cache.cache_clear()


def read(path: Path) -> list[Entry]:
    """Return the entries of a choice table.

    Raises:
        ChoiceTableError: no file, no table, an entry that says nothing this version knows, or two about the same.
    """
    return _choice_tables.read(path, ALLOWED)


def text(entries: Iterable[Entry]) -> str:
    """Return the text of a table's file, which `read` reads: an entry a line, in order.

    Raises:
        ChoiceTableError: an entry says nothing this version knows, or two are about the same.
    """
    return _choice_tables.text(_choice_tables.check(entries, "the table", ALLOWED))


@functools.cache
def _tables() -> tuple[Table, ...]:
    return _LAYERS.tables()


@functools.lru_cache(maxsize=4096)
def _candidates(op: str, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Candidate, ...]:
    """Return the entries that may decide shapes of this n and k."""
    name, found = str(dtype).removeprefix("torch."), []
    for level, table in enumerate(_tables()):
        for entry in table.entries:
            half = {entry["dtype"], name} <= _HALF
            if entry["op"] != op or family(entry["device"]) != family(device) or not (half or entry["dtype"] == name):
                continue
            differs = {
                "type": entry["dtype"] != name,
                "version": (entry["torch"], entry["triton"]) != (_minor("torch"), _minor("triton")),
                "card": entry["device"] != device,
            }
            words = tuple(word for word, differ in differs.items() if differ)
            found.append(candidate(op, n, k, entry, table.name, level, words))
    return tuple(c for c in found if c is not None)


@functools.lru_cache(maxsize=4096)
def _cached_pieces(op: str, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[tuple[int, str], ...]:
    return pieces(_candidates(op, n, k, dtype, device), DEFAULT[op])


def _pieces(op: str, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[tuple[int, str], ...]:
    """Return the choice as a function of the rows."""
    return _cached_pieces(op, n, k, dtype, device)


def _name(index: int) -> str | None:
    return torch.cuda.get_device_name(index) if torch.cuda.is_available() else None


# as torch.compiler.assume_constant_result does, whose import would load the whole compiler
_pieces._dynamo_marked_constant = True  # type: ignore[attr-defined]
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _minor(module: str) -> str | None:
    try:
        return ".".join(importlib.import_module(module).__version__.split(".")[:2])
    except Exception:  # Triton is absent or broken: no entry is about None
        return None
