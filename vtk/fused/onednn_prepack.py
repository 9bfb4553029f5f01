"""Wide products on AMD's processors: oneDNN with weights in its own order, where torch would call MKL.

Torch multiplies fp32 matrices on a CPU by MKL, which does not know AMD's processors well. At the shapes of a ViT-S
oneDNN needed 0.66 to 0.81 of MKL's time for qkv and fc1 at batch 1 and 0.83 to 0.95 at batch 8, and between 0.9 and 1
for the narrow products back to C channels, which therefore stay as they are (AMD EPYC, 1 and 2 threads, weights from
memory). Its weights are a second copy, of the wide matrices only. On other vendors' processors, where nothing was
measured, torch decides.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

_packed = WeakTensorKeyDictionary()
"""Weight to (its storage, address and version, its copy in oneDNN's order)."""


def wide_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return x · wᵀ + b as `torch.nn.functional.linear` does, by oneDNN where that is quicker.

    Args:
        x: (..., K).
        w: (F, K), F > K. A parameter is copied into oneDNN's order once and again when autograd's counter says it
            changed (``w.data.add_`` escapes that counter, here as everywhere); a view is multiplied by torch.
        b: (F).

    Returns:
        (..., F), contiguous; there is no gradient through oneDNN, so where one is wanted torch multiplies.
    """
    if not _takes(x, w):
        return F.linear(x, w, b)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, _in_own_order(w), b, "none", [], "")
    return product


def _takes(x: Tensor, w: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or type(x) is not Tensor or type(w) is not torch.nn.Parameter:
        return False
    if observed() or w.is_inference() or not available():
        return False
    return x.numel() > 0 and not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))


def _in_own_order(w: Tensor) -> Tensor:
    # `.data` may be exchanged: the version stays then, and the new values may lie where the old ones lay. A weak
    # reference to the old storage keeps its identity, not its memory, from being given to another
    storage, state = StorageWeakRef(w.untyped_storage()), (w.data_ptr(), w._version)
    found = _packed.get(w)
    if found is None or found[0].cdata != storage.cdata or found[1] != state:
        found = storage, state, torch.ops.mkldnn._reorder_linear_weight(w.detach(), None)
        _packed[w] = found
    packed: Tensor = found[2]
    return packed


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
def available(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this is an AMD processor under a torch with MKL and oneDNN."""
    try:
        amd = "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:  # not Linux
        return False
    operations = all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return amd and operations and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
