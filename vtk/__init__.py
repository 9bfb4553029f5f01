"""vtk, the ViT toolkit: fine-tune attention only, share the FFN, export, and measure latency.

The names below are functions and classes imported on first use; ``import vtk`` needs neither a GPU nor torch.
Their types are in ``__init__.pyi``.
"""

from vtk._path import as_command, leave_current_folder

if as_command():  # before anything else is imported
    leave_current_folder()

from vtk._lazy import attach

__version__ = "0.1.0"

_where = {
    "AnalyzeConfig": "vtk.analysis.config",
    "AotiConfig": "vtk_export.aoti_config",
    "AuditConfig": "vtk.data.config",
    "Callback": "vtk.training.callbacks",
    "Card": "vtk.card",
    "EpochInfo": "vtk.training.callbacks",
    "EpochStart": "vtk.training.callbacks",
    "EvalConfig": "vtk.evaluation.config",
    "FinetuneConfig": "vtk.training.config",
    "OnnxConfig": "vtk_export.config",
    "Opening": "vtk.runtime.source",
    "ParallelizeConfig": "vtk.branches.config",
    "PredictConfig": "vtk.evaluation.config",
    "Prediction": "vtk.evaluation.labels",
    "PretrainConfig": "vtk.training.pretrain.config",
    "ProfileConfig": "vtk.profiling.config",
    "SaveInfo": "vtk.training.callbacks",
    "ServerConfig": "vtk.profiling.server.config",
    "Source": "vtk.runtime.source",
    "StepInfo": "vtk.training.callbacks",
    "Task": "vtk.tasks.load",
    "TaskBank": "vtk.serving.bank",
    "TasksConfig": "vtk_export.config",
    "TensorrtConfig": "vtk_export.tensorrt_config",
    "TrainConfig": "vtk.training.train_config",
    "TritonConfig": "vtk_export.triton_config",
    "analyze": "vtk.analysis.analyze",
    "audit": "vtk.data.report",
    "compare_profiles": "vtk.profiling.regression",
    "create_model": "vtk.models.module",
    "evaluate": "vtk.answers",
    "export_aoti": "vtk_export.aoti",
    "export_onnx": "vtk_export.onnx",
    "export_tasks": "vtk_export.tasks",
    "export_tensorrt": "vtk_export.tensorrt.export",
    "export_triton": "vtk_export.triton.export",
    "finetune": "vtk.training.finetune",
    "finetune_tasks": "vtk.training.finetune",
    "fuse": "vtk.fused.build",
    "load_backend": "vtk.runtime.backend",
    "load_checkpoint": "vtk.tasks.load",
    "load_task": "vtk.tasks.load",
    "merge_task": "vtk.tasks.merge",
    "open_source": "vtk.runtime.source",
    "parallelize": "vtk.branches.join",
    "predict": "vtk.answers",
    "pretrain": "vtk.training.pretrain.run",
    "profile": "vtk.profiling.profile",
    "profile_server": "vtk.profiling.server.drive",
    "profile_sizes": "vtk.profiling.sizes",
    "save_task": "vtk.tasks.pack",
    "scan": "vtk.data.audit",
    "train": "vtk.training.train",
}
__getattr__, __dir__, __all__ = attach(__name__, _where)
