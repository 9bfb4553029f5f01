"""What blocks with frozen weights keep for backward, and how what was trained is stored."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from vtk.options import Config, Option
from vtk.packs.config import StoredAs

MemoryMode = Literal["plain", "gelu8", "recompute", "minimal"]
MODES: tuple[MemoryMode, ...] = get_args(MemoryMode)
"""Fastest first; each keeps less than the one before."""


@dataclass(frozen=True, kw_only=True)
class PackOptions(Config):
    """The memory mode, and the number format of packs."""

    GROUP: ClassVar[str] = "memory"

    memory: Annotated[
        Literal["auto", "plain", "gelu8", "recompute", "minimal"],
        Option("what frozen blocks keep for backward, fastest to leanest; auto: the fastest that fits", often=True),
    ] = "auto"
    pack_dtype: StoredAs = "fp32"
