"""Quantises an fp32 ONNX file to dynamic int8 with ONNX Runtime."""

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path

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
