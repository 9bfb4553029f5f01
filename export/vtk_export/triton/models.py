"""Makes the content of a model version with the chosen back-end."""

from vtk_export.readme import README
from vtk_export.triton.factor_models import fill_constant, fill_factors, takes_factors
from vtk_export.triton.graph_models import fill_engine, fill_graph
from vtk_export.triton.order import ModelContent, Order
from vtk_export.triton.publish import Draft
from vtk_export.triton.task_models import fill_bank, fill_tasks


def fill(draft: Draft, order: Order) -> ModelContent:
    """Write the content of a model's version into its draft.

    Raises:
        UsageError: a source or combination that the back-end does not take.
        BaseError: packs of different bases.
        DataError: a damaged source.
        VerificationError: a file is not what was asked for.
    """
    if order.config.engine is not None:
        return fill_engine(draft, order)
    makers = {"onnxruntime": fill_graph, "tensorrt": fill_graph, "python": fill_tasks, "vtk": fill_bank}
    if order.config.in_openvino:
        from vtk_export.triton import openvino_models

        makers |= {"python": openvino_models.fill_openvino, "openvino": openvino_models.fill_graph}
    if takes_factors(order):
        makers |= {"python": fill_factors, "onnxruntime": fill_constant}
    content = makers[order.config.server](draft, order)
    (draft.at / README).unlink(missing_ok=True)  # of the file alone; the model's own page is above its versions
    return content
