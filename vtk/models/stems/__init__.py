"""Stems that replace the patch projection of a Vision Transformer (Touvron et al. 2022, Wang et al. 2022)."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ACTIVATIONS": "vtk.models.stems.names",
        "PATCHWISE": "vtk.models.stems.names",
        "STEMS": "vtk.models.stems.names",
        "ScaledReLU": "vtk.models.stems.scaled_relu",
        "Stem": "vtk.models.stems.replace",
        "make_stem": "vtk.models.stems.build",
        "read_scaled_relu": "vtk.models.stems.scaled_relu",
        "replace_stem": "vtk.models.stems.replace",
    },
)
