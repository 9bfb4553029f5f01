"""Fine-tuning: policies, the one engine, precision regimes, resume."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Classification": "vtk.training.objectives.base",
        "FinetuneConfig": "vtk.training.finetune_config",
        "FinetuneResult": "vtk.training.engine.result",
        "FitResult": "vtk.training.engine.result",
        "TrainConfig": "vtk.training.train_config",
        "TrainResult": "vtk.training.engine.result",
        "apply_memory_mode": "vtk.training.frozen_ffn.blocks",
        "finetune_tasks": "vtk.training.finetune",
        "from_recipe": "vtk.training.train_config",
        "fit": "vtk.training.engine.fitting",
        "dry_run": "vtk.training.preview",
        "memory_report": "vtk.training.finetune",
        "register_attention": "vtk.training.policies.module_kinds",
        "select": "vtk.training.policies.policy",
        "take_census": "vtk.training.policies.census",
        "train_memory": "vtk.training.train",
    },
)
