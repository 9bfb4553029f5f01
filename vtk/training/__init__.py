"""Fine-tuning: policies, the one engine, precision regimes, resume."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Classification": "vtk.training.objective",
        "FinetuneConfig": "vtk.training.config",
        "FinetuneResult": "vtk.training.result",
        "FitResult": "vtk.training.result",
        "TrainConfig": "vtk.training.train_config",
        "TrainResult": "vtk.training.result",
        "apply_memory_mode": "vtk.training.frozen_ffn.blocks",
        "finetune_tasks": "vtk.training.finetune",
        "from_recipe": "vtk.training.recipes",
        "fit": "vtk.training.engine",
        "dry_run": "vtk.training.ahead",
        "memory_report": "vtk.training.finetune",
        "register_attention": "vtk.training.kinds",
        "select": "vtk.training.policy",
        "take_census": "vtk.training.census",
        "train_memory": "vtk.training.train",
    },
)
