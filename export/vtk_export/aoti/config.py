"""Options of ``vtk export aoti``; free of torch."""

from dataclasses import dataclass
from typing import ClassVar

from vtk.options import Config
from vtk.options.shared import (
    Device,
    Dtype,
    Fuse,
    Out,
    Overwrite,
    ProfileSizes,
    Seed,
    SourceOptions,
    Split,
    Threads,
    VerifyData,
)


@dataclass(frozen=True, kw_only=True)
class AotiConfig(Config):
    """What AOTInductor file is made of a model, where, and for which device: it runs on that kind only.

    Raises:
        UsageError: a value is out of range.
    """

    GROUP: ClassVar[str] = "format"

    out: Out
    dtype: Dtype = "fp32"
    device: Device = "auto"
    fuse: Fuse = None
    data: VerifyData = None
    split: Split = None
    seed: Seed = 0
    threads: Threads = None
    profile: ProfileSizes = ()
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class AotiCommand(AotiConfig, SourceOptions):
    """``vtk export aoti``: what to open, and what to make of it."""
