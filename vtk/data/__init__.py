"""Folders of images: the audit, the split, decoding, transforms and loaders."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BadFile": "vtk.data.samples",
        "DataAudit": "vtk.data.samples",
        "ImageDataset": "vtk.data.loader",
        "Sample": "vtk.data.samples",
        "eval_transform": "vtk.data.image_transforms",
        "list_images": "vtk.data.listing",
        "load_image": "vtk.data.images",
        "make_loader": "vtk.data.loader",
        "read_image": "vtk.data.bands",
        "scan": "vtk.data.audit",
        "set_epoch": "vtk.data.loader",
        "train_transform": "vtk.data.image_transforms",
        "write_digits": "vtk.data.digits",
    },
)
