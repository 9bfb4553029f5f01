"""Pre-training without labels: masked image modelling on folders of images, through the one engine."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "PretrainConfig": "vtk.training.pretrain.config",
        "PretrainResult": "vtk.training.pretrain.result",
        "pretrain": "vtk.training.pretrain.run",
    },
)
