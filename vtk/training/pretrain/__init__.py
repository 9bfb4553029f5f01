"""Pre-training without labels (masked image modelling) or by contrasting classes (SupCon), on folders of images."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "PretrainConfig": "vtk.training.pretrain.config",
        "PretrainResult": "vtk.training.pretrain.result",
        "pretrain": "vtk.training.pretrain.run",
    },
)
