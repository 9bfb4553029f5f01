"""Options of ``vtk export aoti``; free of torch."""

from dataclasses import dataclass

from vtk.options.shared import Device, Dtype, Out, SourceOptions, VerifyData
from vtk_export.options import ExportConfig


@dataclass(frozen=True, kw_only=True)
class AotiConfig(ExportConfig):
    """What AOTInductor file is made of a model, where, and for which device: it runs on that kind only.

    Raises:
        UsageError: a value is out of range.
    """

    out: Out
    dtype: Dtype = "fp32"
    device: Device = "auto"
    data: VerifyData = None


@dataclass(frozen=True, kw_only=True)
class AotiCommand(AotiConfig, SourceOptions):
    """``vtk export aoti``: what to open, and what to make of it."""
