"""Fine-tuning: policies, the one engine, precision regimes, resume."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Classification": "vtk.training.objective",
        "FinetuneConfig": "vtk.training.config",
        "FinetuneResult": "vtk.training.finetune",
        "FitResult": "vtk.training.result",
        "fit": "vtk.training.engine",
        "register_attention": "vtk.training.kinds",
        "select": "vtk.training.policy",
        "take_census": "vtk.training.census",
    },
)
