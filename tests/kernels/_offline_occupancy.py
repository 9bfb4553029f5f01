"""Programs of a kernel that fit on one multiprocessor at a time, from the CUDA programming guide's tables."""

from dataclasses import dataclass

from vtk_kernels._resident import Resident


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor, by compute capability.

    Attributes:
        shared: bytes of shared memory for all programs.
        block: bytes that one program may have.
        warps: of all programs.
        count: multiprocessors of the card that is counted with: A100, RTX A6000, L40S, H200, B200, RTX 5090.
    """

    shared: int
    block: int
    warps: int
    count: int


CARDS = {
    80: Multiprocessor(164 * 1024, 163 * 1024, 64, 108),
    86: Multiprocessor(100 * 1024, 99 * 1024, 48, 84),
    89: Multiprocessor(100 * 1024, 99 * 1024, 48, 142),
    90: Multiprocessor(228 * 1024, 227 * 1024, 64, 132),
    100: Multiprocessor(228 * 1024, 227 * 1024, 64, 148),
    120: Multiprocessor(100 * 1024, 99 * 1024, 48, 170),
}
RESERVED = 1024
"""Bytes of shared memory that the system takes for each program."""

PROGRAMS, PARTITIONS = 32, 4
"""Most programs of a multiprocessor; its parts, each with a quarter of the warps and registers."""

REGISTERS = 65536
_UNIT = 256
"""Registers are given to a warp in these."""


def resident(registers: int, shared: int, warps: int, capability: int) -> int:
    """Return how many programs fit.

    Args:
        registers: of a thread.
        shared: bytes of a program.
        warps: of a program.
        capability: key of `CARDS`.
    """
    of_warp = -(-registers * 32 // _UNIT) * _UNIT
    by_registers = REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps
    card = CARDS[capability]
    return min(PROGRAMS, card.warps // warps, by_registers, card.shared // (shared + RESERVED))


def wanted(counted_on: Resident, programs: int, capability: int) -> int:
    """Return how many programs a multiprocessor should hold: as the launcher counts on, but no more than a launch has.

    Args:
        counted_on: entry of `vtk_kernels._resident.RESIDENT`.
        programs: of the launch.
        capability: of the card.
    """
    most = counted_on.hopper if CARDS[capability].shared > CARDS[80].shared else counted_on.ampere
    if capability // 10 == 10 and counted_on.blackwell is not None:
        most = counted_on.blackwell
    return min(most, -(-programs // CARDS[capability].count))
