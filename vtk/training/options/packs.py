"""What blocks with frozen weights keep for backward, and how what was trained is stored."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.training.options.checks import require

MemoryMode = Literal["plain", "gelu8", "recompute", "minimal"]
MODES: tuple[MemoryMode, ...] = ("plain", "gelu8", "recompute", "minimal")
"""Fastest first; each keeps less than the one before."""


@dataclass(frozen=True)
class PackOptions:
    """The memory mode, and the number format of packs."""

    memory: Literal["auto", "plain", "gelu8", "recompute", "minimal"] = field(
        default="auto",
        metadata={
            "help": "what blocks with frozen norms and FFN keep for backward, fastest first and leanest last: plain, "
            "gelu8 (GELU's derivative in a byte), recompute (fc1 again), minimal (qkv again, too); auto is the fastest "
            "that fits the device's free memory"
        },
    )
    pack_dtype: Literal["fp32", "bf16", "int8"] = field(
        default="fp32",
        metadata={"help": "how trained weights are stored; fp32 reloads bit for bit, int8 takes a quarter of it"},
    )

    def _check_packs(self) -> None:
        require(self.memory in ("auto", *MODES), "memory", self.memory, f"auto, {', '.join(MODES)}")
