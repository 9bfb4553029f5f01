"""AlterNet (Park and Kim 2022): the build-up rule, the model, and its names in timm's registry."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AlterNet": "vtk.models.alternet.model",
        "AttentionBlock": "vtk.models.alternet.window_attention",
        "WindowAttention": "vtk.models.alternet.window_attention",
        "build_up": "vtk.models.alternet.transform",
        "per_stage": "vtk.models.alternet.rule",
        "placement": "vtk.models.alternet.rule",
    },
)
