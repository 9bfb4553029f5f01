"""Programs of a kernel that fit on one multiprocessor at a time, from the CUDA programming guide's tables."""

from dataclasses import dataclass

from vtk_kernels._resident import Resident


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor, by compute capability.

    Attributes:
        shared: bytes of shared memory for all programs.
        block: bytes that one program may have.
        count: multiprocessors of the card that is counted with: A100, H100 and H200, B200.
    """

    shared: int
    block: int
    count: int


CARDS = {
    80: Multiprocessor(164 * 1024, 163 * 1024, 108),
    90: Multiprocessor(228 * 1024, 227 * 1024, 132),
    100: Multiprocessor(228 * 1024, 227 * 1024, 148),
}
RESERVED = 1024
"""Bytes of shared memory that the system takes for each program."""

WARPS, PROGRAMS, PARTITIONS = 64, 32, 4
"""Warps and programs of a multiprocessor; its parts, each with a quarter of the warps and registers."""

REGISTERS = 65536
_UNIT = 256
"""Registers are given to a warp in these."""


def resident(registers: int, shared: int, warps: int, capability: int) -> int:
    """Return how many programs fit.

    Args:
        registers: of a thread.
        shared: bytes of a program.
        warps: of a program.
        capability: 80, 90 or 100.
    """
    of_warp = -(-registers * 32 // _UNIT) * _UNIT
    by_registers = REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps
    return min(PROGRAMS, WARPS // warps, by_registers, CARDS[capability].shared // (shared + RESERVED))


def wanted(counted_on: Resident, programs: int, capability: int) -> int:
    """Return how many programs a multiprocessor should hold: as the launcher counts on, but no more than a launch has.

    Args:
        counted_on: entry of `vtk_kernels._resident.RESIDENT`.
        programs: of the launch.
        capability: of the card.
    """
    return min(counted_on.ampere if capability < 90 else counted_on.hopper, -(-programs // CARDS[capability].count))
