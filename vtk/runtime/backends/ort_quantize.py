"""Quantises an fp32 ONNX file to int8 with ONNX Runtime.

It is in this package because calibration opens a session.
"""

import contextlib
import io
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from vtk.errors import VerificationError

_PRODUCTS = ("MatMul", "Gemm")


def quantize_dynamic(source: Path, target: Path) -> None:
    """Store the weights of products as int8, with activation ranges measured at every run: for CPU servers.

    Convolutions, norms, softmax and the products of attention, which have no weights, stay in float.

    Raises:
        VerificationError: the quantiser fails.
    """
    with _silence():
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization import quantize_dynamic as quantize

        options = {"MatMulConstBOnly": True, "WeightSymmetric": True}
        quantize(
            source, target, op_types_to_quantize=list(_PRODUCTS), weight_type=QuantType.QInt8, per_channel=True,
            extra_options=options,
        )  # fmt: skip


def quantize_static(source: Path, target: Path, batches: Iterable[Tensor]) -> None:
    """Put QuantizeLinear and DequantizeLinear around products and convolutions, as TensorRT and GPUs take them.

    Activations are symmetric int8 (zero point 0) with one scale each, also those of attention's two products; weights
    have one scale per output channel, biases stay in float; so do norms and softmax.

    Args:
        source: the fp32 file, with an input ``pixel_values``.
        target: where the int8 file goes.
        batches: model inputs (B, C, H, W) from which the activations' ranges are taken.

    Raises:
        VerificationError: the quantiser fails.
    """
    with _silence():
        from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType
        from onnxruntime.quantization import quantize_static as quantize

        class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
            def __init__(self) -> None:
                self.left: Iterator[Tensor] = iter(batches)

            def get_next(self) -> dict[str, Any] | None:
                images = next(self.left, None)
                return None if images is None else {"pixel_values": images.numpy()}

        quantize(
            source,
            target,
            Reader(),
            quant_format=QuantFormat.QDQ,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=["Conv", *_PRODUCTS],
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "QuantizeBias": False,
                "MatMulConstBOnly": True,
                # sums, norms and GELU read the products in float: a second rounding would only cost accuracy
                "OpTypesToExcludeOutputQuantization": ["Conv", *_PRODUCTS],
            },
        )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the quantiser's log and prints: stdout may be a JSON object."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # the quantiser raises whatever its numpy or protobuf code raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise VerificationError(f"onnxruntime's quantiser cannot convert the graph: {reason}") from error
    finally:
        logging.disable(level)
