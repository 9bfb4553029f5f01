"""timm models by name, with base weights and transforms that packs store."""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Base": "vtk.models.weights.base",
        "Created": "vtk.models.create",
        "add_context_broadcast": "vtk.models.transforms.context_layers",
        "build_model": "vtk.models.create",
        "create_model": "vtk.models.module",
        "head_names": "vtk.models.task_parameters",
        "input_spec": "vtk.models.inputs",
        "parallelize": "vtk.models.transforms.parallel_blocks",
        "position_names": "vtk.models.task_parameters",
        "read_base": "vtk.models.weights.sources",
    },
)
