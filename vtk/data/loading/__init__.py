"""Batches of transformed images: transforms, samplers and the loader."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "EpochSampler": "vtk.data.loading.samplers",
        "ImageDataset": "vtk.data.loading.loader",
        "TrainTransform": "vtk.data.loading.train_pipeline",
        "eval_transform": "vtk.data.loading.eval_pipeline",
        "make_loader": "vtk.data.loading.loader",
        "mix": "vtk.data.loading.samplers",
        "read_input": "vtk.data.loading.eval_pipeline",
        "set_epoch": "vtk.data.loading.loader",
        "train_transform": "vtk.data.loading.train_pipeline",
    },
)
