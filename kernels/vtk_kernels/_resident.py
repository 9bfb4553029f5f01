"""Programs of each kernel that its launcher counts on a multiprocessor to hold at a time.

A launcher chooses tiles, stages and grid for such a number: two programs, for example, of which one computes GELU
while the other multiplies. Whether they fit depends on what the compiler makes of the kernel, and differs between its
versions: `tests/kernels/_offline.py` compiles every launch and says where registers or shared memory leave room for
fewer. On Hopper, where one takes too many registers, `registers` bounds them at the launch.
"""

from typing import NamedTuple

from torch import Tensor

from vtk_kernels._device import capability, multiprocessors


class Resident(NamedTuple):
    """Programs of a kernel on one multiprocessor.

    Attributes:
        ampere: before Hopper, on one of compute capability 8.0 with its 164 KiB of shared memory.
        hopper: on Hopper, with 228 KiB.
        blackwell: after it, on capability 10, where registers cannot be bounded; None for as many as on Hopper.
    """

    ampere: int
    hopper: int
    blackwell: int | None = None


RESIDENT = {
    "_add_norm_e4m3_kernel": Resident(4, 4),
    "_add_norm_kernel": Resident(4, 4),
    "_context_broadcast_kernel": Resident(4, 4),
    "_grouped_linear_backward_kernel": Resident(2, 4),
    "_grouped_linear_kernel": Resident(1, 2, 1),
    "_linear_gelu_backward_kernel": Resident(1, 2),
    "_linear_kernel": Resident(1, 2, 1),
    "_low_rank_expand_kernel": Resident(2, 4, 2),
    "_low_rank_linear_kernel": Resident(1, 2, 1),
    "_low_rank_shrink_kernel": Resident(2, 4),
    "_norm_backward_kernel": Resident(4, 4),
    "_norm_kernel": Resident(4, 4),
    "_packed_attention_kernel": Resident(2, 2),
    "_patchify_kernel": Resident(8, 8),
    "_prepare_heads_kernel": Resident(4, 4),
    "_quantize_rows_kernel": Resident(2, 4),
    "_residual_kernel": Resident(1, 2),
    "_rotary_attention_kernel": Resident(1, 2),
    "_short_attention_kernel": Resident(2, 2),
    "_splitk_linear_kernel": Resident(1, 2),
    "_swiglu_backward_kernel": Resident(1, 2),
    "_swiglu_kernel": Resident(1, 2, 1),
}
"""Name of a kernel to the number; every kernel has one. A launch of fewer programs needs no more than it has."""

_REGISTERS = 65536
"""Of a multiprocessor."""


def programs(kernel: str, x: Tensor) -> int:
    """Return the programs of a kernel that all multiprocessors of a card from Hopper on hold at a time."""
    counted = RESIDENT[kernel]
    each = counted.hopper if counted.blackwell is None or capability(x) < 10 else counted.blackwell
    return each * multiprocessors(x)


def registers(kernel: str, warps: int, x: Tensor) -> int | None:
    """Return the registers a thread may have if as many programs as counted on shall fit on a Hopper.

    For the option ``maxnreg`` of a launch. None where a thread cannot have too many, and on other cards: those before
    compute addresses in threads, those after have sums in a memory of their own and spill under a bound.

    Args:
        kernel: key of `RESIDENT`.
        warps: of a program.
        x: a tensor on the card.
    """
    if capability(x) != 9:
        return None
    limit = _REGISTERS // (32 * warps * RESIDENT[kernel].hopper) // 8 * 8
    return limit if limit < 255 else None
