"""Metrics of classifiers, shared by training, evaluation and export checks."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ClassRow": "vtk.evaluation.metrics",
        "EvalConfig": "vtk.evaluation.config",
        "Metrics": "vtk.evaluation.metrics",
        "PredictConfig": "vtk.evaluation.config",
        "MultiLabelMetrics": "vtk.evaluation.multilabel",
        "confusion_png": "vtk.evaluation.result_files",
        "curves_png": "vtk.evaluation.result_files",
        "evaluate": "vtk.evaluation.metrics",
        "evaluate_labels": "vtk.evaluation.multilabel",
    },
)
