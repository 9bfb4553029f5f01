"""What stands before the blocks of a Vision Transformer in place of its patch projection (papers A and E)."""

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
