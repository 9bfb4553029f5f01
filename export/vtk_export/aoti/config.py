"""Options of ``vtk export aoti``; free of torch."""

from dataclasses import dataclass

from vtk.options.shared import Device, Dtype, Out, Overwrite, ProfileSizes, SourceOptions, VerifyData
from vtk_export.options import ExportConfig


@dataclass(frozen=True, kw_only=True)
class AotiConfig(ExportConfig):
    """Options of the AOTInductor export of one model, which runs on one kind of device only.

    Raises:
        UsageError: a value is out of range.
    """

    out: Out
    dtype: Dtype = "fp32"
    device: Device = "auto"
    data: VerifyData = None
    profile: ProfileSizes = ()
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class AotiCommand(AotiConfig, SourceOptions):
    """``vtk export aoti``: the source and the options."""
