"""Opens models from any source and runs them with any back-end, through one `Backend` protocol.

Nobody else in the toolkit opens an ONNX Runtime session.
"""

from vtk._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Backend": "vtk.runtime.backends.base",
        "Source": "vtk.runtime.source",
        "evaluate_source": "vtk.runtime.evaluation",
        "load_backend": "vtk.runtime.backends.base",
        "open_source": "vtk.runtime.opening",
        "predict_images": "vtk.runtime.prediction",
        "predictor": "vtk.runtime.backends.base",
    },
)
