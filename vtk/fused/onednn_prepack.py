"""Products on a CPU by copies of their weights: in oneDNN's own order on AMD's processors, rotated pairs side by side.

Torch multiplies fp32 matrices on a CPU by MKL, which does not know AMD's processors well. At the shapes of a ViT-S
oneDNN with weights in its own order needed 0.88 to 0.91 of MKL's time for qkv, 0.86 to 0.92 for the products back to C
channels with what is added to them, and GELU or SiLU in its epilogue 0.95 to 0.99 of a pass of their own (CPU time of
one thread of an AMD EPYC, batch 1 and 8). bf16 products, which torch gives to oneDNN anyway, needed 0.80 to 0.96 of
their time with weights in that order. On other vendors' processors, where nothing was measured, torch decides.

A rotary embedding of channels i and i + D/2 is one pass over queries and keys as complex numbers once the two lie side
by side: the rows of the weight that make them are put in that order. All these are second copies of the weights.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

Post = Literal["none", "gelu", "silu"]
"""What follows a product: nothing, the exact GELU, SiLU."""

_POST: dict[Post, tuple[str, str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "none": ("none", "", lambda y: y, lambda y: y),
    "gelu": ("gelu", "none", F.gelu, torch.ops.aten.gelu_),
    "silu": ("swish", "", F.silu, torch.ops.aten.silu_),
}
"""oneDNN's name and algorithm of each, torch's function, and the same in place."""


class Rows(NamedTuple):
    """Rows of a weight, and their order.

    Attributes:
        part, parts: the ``part``-th of so many equal parts.
        rotated: of the first so many rows, those of channels i and i + D/2 of a head side by side.
        head_dim: D.
    """

    part: int = 0
    parts: int = 1
    rotated: int = 0
    head_dim: int = 0

    def of(self, t: Tensor) -> Tensor:
        """Return these rows of a weight or bias."""
        t = t.chunk(self.parts)[self.part] if self.parts > 1 else t
        if not self.rotated:
            return t
        pairs = t[: self.rotated].unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        return torch.cat((pairs, t[self.rotated :]))


ALL = Rows()

_NONE: list[float] = []

_product: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

_packed = WeakTensorKeyDictionary()
"""Weight or bias to (a weak reference to its storage, this with address and version, copies by rows and order)."""


def wide_linear(x: Tensor, w: Tensor, b: Tensor, post: Post = "none", rows: Rows = ALL) -> Tensor:
    """Return post(x · wᵀ + b) as torch's functions do, by oneDNN where that is quicker.

    Args:
        x: (..., K).
        w: (F, K). A parameter is copied into oneDNN's order once and again when autograd's counter says it changed
            (``w.data.add_`` escapes that counter, here as everywhere); a view is multiplied by torch.
        b: (F).
        post: what follows the sum.
        rows: which rows of w and b, and in which order.

    Returns:
        (..., rows), contiguous; there is no gradient through oneDNN, so where one is wanted torch multiplies.
    """
    name, algorithm, function, in_place = _POST[post]
    plain = keeps_copies(x, w)
    if plain and multiplies(x.dtype) and available():
        if rows is not ALL:
            b = _copy(b, rows, False)
        product: Tensor = _product(x, _copy(w, rows, True), b, name, _NONE, algorithm)
        return product
    y = F.linear(x, _copy(w, rows, False) if plain and rows.rotated else rows.of(w), rows.of(b))
    # a second wide tensor costs a CPU more time than the function itself
    alone = not y.is_cuda and not y.requires_grad and not torch.compiler.is_compiling()
    return in_place(y) if alone else function(y)


def keeps_copies(x: Tensor, w: Tensor) -> bool:
    """Return whether a weight's copy may be kept and used: on a CPU, for plain tensors that nobody looks at."""
    if x.device.type != "cpu" or type(x) is not Tensor or type(w) is not torch.nn.Parameter:
        return False
    if observed() or w.is_inference() or x.dtype != w.dtype:
        return False
    return x.numel() > 0 and not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))


def _copy(t: Tensor, rows: Rows, own_order: bool) -> Tensor:
    # `.data` may be exchanged: the version stays then, and the new values may lie where the old ones lay. A weak
    # reference to the old storage keeps its identity, not its memory, from being given to another
    found = _packed.get(t)
    if found is None or found[1] != (t.untyped_storage()._cdata, t.data_ptr(), t._version):
        storage = StorageWeakRef(t.untyped_storage())
        found = _packed[t] = storage, (storage.cdata, t.data_ptr(), t._version), {}
    copies: dict[tuple[Rows, bool], Tensor] = found[2]
    copy = copies.get((rows, own_order))
    if copy is None:
        copy = rows.of(t.detach())
        if own_order:
            copy = torch.ops.mkldnn._reorder_linear_weight(copy.contiguous(), None)
        copies[rows, own_order] = copy
    return copy


def forget(module: nn.Module) -> None:
    """Drop the copies of a module's weights, which are about to move or to change their type."""
    for parameter in module.parameters():
        _packed.pop(parameter, None)


def observed() -> bool:
    """Whether somebody records or counts the operations, who knows torch's plain ones and not these."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return True
    return is_tracing() or _get_current_dispatch_mode() is not None


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies this type here: fp32, and bf16 on processors that it has kernels for."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


@functools.cache
def available(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this is an AMD processor under a torch with MKL and oneDNN."""
    try:
        amd = "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:  # not Linux
        return False
    operations = all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return amd and operations and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
