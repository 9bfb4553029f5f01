"""vtk, the ViT toolkit: fine-tune attention only, share the FFN, export, and measure latency.

The names below are functions and classes imported on first use; ``import vtk`` needs neither a GPU nor torch.
"""

from vtk._lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Callback": "vtk.training.callbacks",
        "Card": "vtk.card",
        "create_model": "vtk.models.module",
        "evaluate": "vtk.evaluation.metrics",
        "export_onnx": "vtk_export.onnx",
        "export_tasks": "vtk_export.tasks",
        "export_triton": "vtk_export.triton.export",
        "finetune": "vtk.training.finetune",
        "finetune_tasks": "vtk.training.finetune",
        "fuse": "vtk.fused.build",
        "load_backend": "vtk.runtime.backend",
        "load_task": "vtk.tasks.load",
        "merge_task": "vtk.tasks.merge",
        "open_source": "vtk.runtime.source",
        "pretrain": "vtk.training.pretrain.run",
        "profile": "vtk.profiling.profile",
        "save_task": "vtk.tasks.pack",
        "scan": "vtk.data.audit",
        "train": "vtk.training.train",
    },
)
