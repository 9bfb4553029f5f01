"""Folders of images: the audit, the split, decoding, transforms and loaders."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BadFile": "vtk.data.audit.result",
        "DataAudit": "vtk.data.audit.result",
        "ImageDataset": "vtk.data.loading.loader",
        "Sample": "vtk.data.audit.result",
        "eval_transform": "vtk.data.loading.eval_pipeline",
        "list_images": "vtk.data.sources.image_set",
        "load_image": "vtk.data.decoding.images",
        "make_loader": "vtk.data.loading.loader",
        "read_image": "vtk.data.decoding.decode",
        "scan": "vtk.data.audit.folder_scan",
        "set_epoch": "vtk.data.loading.loader",
        "train_transform": "vtk.data.loading.train_pipeline",
        "write_digits": "vtk.data.digits",
    },
)
