"""Why a model behaves as it does: curvature of its loss, density of its attention, likeness of its tokens."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AttentionEntropy": "vtk.analysis.entropy",
        "CrossEntropy": "vtk.analysis.losses",
        "Flatness": "vtk.analysis.flatness",
        "HessianMax": "vtk.analysis.hessian",
        "HessianSpectrum": "vtk.analysis.hessian",
        "MissRate": "vtk.analysis.interpolation",
        "TokenSimilarity": "vtk.analysis.tokens",
        "attention_entropy": "vtk.analysis.entropy",
        "average_flatness": "vtk.analysis.flatness",
        "hessian_max": "vtk.analysis.hessian",
        "hessian_spectrum": "vtk.analysis.hessian",
        "miss_rate": "vtk.analysis.interpolation",
        "parameter_blocks": "vtk.analysis.blocks",
        "token_similarity": "vtk.analysis.tokens",
    },
)
