"""An ONNX file in ONNX Runtime's TensorRT provider: TensorRT builds an engine from it at the first run of a size."""

from vtk.runtime.ort_backend import OrtCudaBackend


class OrtTrtBackend(OrtCudaBackend):
    """ONNX Runtime with TensorRT; nodes that TensorRT leaves go to CUDA. Inputs and outputs stay on the device.

    An engine is for the sizes it has met: the first run of a larger batch builds another one, which takes minutes.

    Attributes:
        compiles: its first run of a size is a build.
    """

    name = "ort-trt"
    execution_provider = "TensorrtExecutionProvider"
    compiles = True
