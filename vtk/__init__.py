"""vtk, the ViT toolkit: fine-tune attention only, share the FFN, export, and measure latency.

The names below are functions and classes imported on first use; ``import vtk`` needs neither a GPU nor torch.
Their types are in ``__init__.pyi``.
"""

from vtk._path import as_command, leave_current_folder

if as_command():  # before anything else is imported
    leave_current_folder()

from vtk._lazy import attach
from vtk._moved import install

install()

__version__ = "0.1.0"

_where = {
    "AnalyzeConfig": "vtk.analysis.config",
    "AotiConfig": "vtk_export.aoti.config",
    "AuditConfig": "vtk.data.config",
    "Callback": "vtk.training.engine.callbacks",
    "Card": "vtk.card",
    "EmbedConfig": "vtk.runtime.embedding.config",
    "EpochInfo": "vtk.training.engine.callbacks",
    "EpochStart": "vtk.training.engine.callbacks",
    "EvalConfig": "vtk.evaluation.config",
    "FinetuneConfig": "vtk.training.finetune_config",
    "OnnxConfig": "vtk_export.onnx.config",
    "OpenvinoConfig": "vtk_export.openvino.config",
    "Opening": "vtk.runtime.source",
    "ParallelizeConfig": "vtk.branches.config",
    "PredictConfig": "vtk.evaluation.config",
    "Prediction": "vtk.evaluation.labels",
    "PretrainConfig": "vtk.training.pretrain.config",
    "ProfileConfig": "vtk.profiling.config",
    "SaveInfo": "vtk.training.engine.callbacks",
    "ServerConfig": "vtk.profiling.server.config",
    "Source": "vtk.runtime.source",
    "StepInfo": "vtk.training.engine.callbacks",
    "Task": "vtk.packs.load",
    "TaskBank": "vtk.bank.bank",
    "TasksConfig": "vtk_export.tasks.config",
    "TensorrtConfig": "vtk_export.tensorrt.config",
    "TrainConfig": "vtk.training.train_config",
    "TritonConfig": "vtk_export.triton.config",
    "analyze": "vtk.analysis.analyze",
    "audit": "vtk.data.audit.report",
    "compare_profiles": "vtk.profiling.regression",
    "create_model": "vtk.models.module",
    "embed": "vtk.answers",
    "evaluate": "vtk.answers",
    "export_aoti": "vtk_export.aoti.export",
    "export_onnx": "vtk_export.onnx.export",
    "export_openvino": "vtk_export.openvino.export",
    "export_tasks": "vtk_export.tasks.export",
    "export_tensorrt": "vtk_export.tensorrt.export",
    "export_triton": "vtk_export.triton.export",
    "finetune": "vtk.training.finetune",
    "finetune_tasks": "vtk.training.finetune",
    "fuse": "vtk.fused.build",
    "load_backend": "vtk.runtime.backends.base",
    "load_checkpoint": "vtk.packs.load",
    "load_task": "vtk.packs.load",
    "merge_task": "vtk.packs.merge",
    "open_source": "vtk.runtime.opening",
    "parallelize": "vtk.branches.join",
    "predict": "vtk.answers",
    "pretrain": "vtk.training.pretrain.run",
    "profile": "vtk.profiling.profile",
    "profile_server": "vtk.profiling.server.drive",
    "profile_sizes": "vtk.profiling.sizes",
    "save_task": "vtk.packs.pack",
    "scan": "vtk.data.audit.folder_scan",
    "search_setups": "vtk.profiling.search.search",
    "train": "vtk.training.train",
}
__getattr__, __dir__, __all__ = attach(__name__, _where)
