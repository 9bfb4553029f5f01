"""Folders of images: the audit, the split, decoding, transforms and loaders."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BadFile": "vtk.data.audit.result",
        "DataAudit": "vtk.data.audit.result",
        "ImageDataset": "vtk.data.loading.loader",
        "Sample": "vtk.data.audit.result",
        "eval_transform": "vtk.data.loading.image_transforms",
        "list_images": "vtk.data.sources.listing",
        "load_image": "vtk.data.decoding.images",
        "make_loader": "vtk.data.loading.loader",
        "read_image": "vtk.data.decoding.bands",
        "scan": "vtk.data.audit.scan",
        "set_epoch": "vtk.data.loading.loader",
        "train_transform": "vtk.data.loading.image_transforms",
        "write_digits": "vtk.data.digits",
    },
)
