"""Tables of the operators and types that TensorRT's ONNX parser takes, by version.

Sources, all of onnx/onnx-tensorrt: docs/operators.md of 8.5 with the operators that docs/Changelog.md adds in 8.6;
docs/operators.md of 9.2 and 10.15; docs/Changelog.md for the versions of 10 in which operators came. The types of 10.15
are taken for all of 10 and 11: what 9.2 lists beyond them (INT8 and FP8 outside Q/DQ pairs) is what later versions no
longer promise. Where an operator's first version is not written down it counts from the first list that has it. The
list of 11 is that of 10.15; the page of 11.2 names the same opsets.
"""

from onnx import TensorProto

_T = TensorProto
_FLOATS = frozenset({_T.FLOAT, _T.FLOAT16, _T.BFLOAT16})
_OLD_FLOATS = frozenset({_T.FLOAT, _T.FLOAT16})
_INTS = frozenset({_T.INT32, _T.INT64})
_BOOL = frozenset({_T.BOOL})
_ALL = _FLOATS | _INTS | _BOOL
_OLD_ALL = _OLD_FLOATS | _INTS | _BOOL | {_T.INT8}

Table = dict[str, frozenset[int]]
"""Operator to the types that it takes: of its data input, or of its output where it has none."""


def _table(*groups: tuple[frozenset[int], str]) -> Table:
    return {name: types for types, names in groups for name in names.split()}


_NEW: Table = _table(
    (
        _FLOATS,
        "Acos Acosh Asin Asinh Atan Atanh Attention AveragePool BatchNormalization Ceil Celu Clip Conv "
        "ConvTranspose Cos Cosh CumSum Dropout Einsum Elu Erf Exp Floor GRU Gelu Gemm GlobalAveragePool "
        "GlobalLpPool GlobalMaxPool GroupNormalization HardSigmoid HardSwish Hardmax ImageScaler "
        "InstanceNormalization IsInf LRN LSTM LayerNormalization LeakyRelu Log LogSoftmax LpNormalization "
        "LpPool MatMul MaxPool MeanVarianceNormalization PRelu ParametricSoftplus QuantizeLinear "
        "RMSNormalization RNN Reciprocal Resize RotaryEmbedding Round ScaledTanh Scan Selu Sigmoid Sin Sinh "
        "Softmax Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Upsample",
    ),
    (
        _FLOATS | _INTS,
        "Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Max Mean "
        "Min Mod Mul Neg Pad Pow Range ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean "
        "ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Scatter ScatterElements ScatterND Shrink Sign "
        "SpaceToDepth Sub Sum TopK",
    ),
    (
        _ALL,
        "Concat Expand EyeLike Flatten Gather GatherElements GatherND Identity If Loop OneHot Reshape "
        "ReverseSequence Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where",
    ),
    (
        _ALL | {_T.UINT8},
        "Cast CastLike",
    ),
    (
        _ALL | {_T.INT4, _T.FLOAT8E4M3FN, _T.FLOAT4E2M1},
        "Constant",
    ),
    (
        _INTS,
        "ConstantOfShape",
    ),
    (
        _OLD_FLOATS,
        "BlackmanWindow DeformConv GridSample HammingWindow HannWindow Mish NonMaxSuppression NonZero "
        "RoiAlign",
    ),
    (
        _FLOATS,
        "RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    ),
    (
        frozenset({_T.FLOAT}),
        "STFT",
    ),
    (
        _FLOATS | {_T.INT32},
        "TensorScatter",
    ),
    (
        _BOOL,
        "And Not Or Xor",
    ),
    (
        frozenset({_T.INT8, _T.INT4, _T.FLOAT8E4M3FN, _T.FLOAT4E2M1}),
        "DequantizeLinear",
    ),
)  # fmt: skip

SINCE: dict[str, tuple[int, int]] = {
    "DeformConv": (10, 1),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), (10, 4)),
    "STFT": (10, 5),
    "Attention": (10, 14),
    **dict.fromkeys(("RotaryEmbedding", "RMSNormalization", "TensorScatter", "Gelu", "Mish"), (10, 15)),
}
"""Operators that not every 10 has, to the version that brought them."""

# INT64 is written for INT32: 8.6 lowers the one to the other
_86: Table = _table(
    (
        _OLD_FLOATS,
        "Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Conv ConvTranspose "
        "Cos Cosh CumSum Dropout Einsum Elu Erf Exp Floor GRU Gemm GlobalAveragePool GlobalLpPool "
        "GlobalMaxPool GridSample GroupNormalization HardSigmoid HardSwish ImageScaler InstanceNormalization "
        "IsInf LRN LSTM LayerNormalization LeakyRelu Log LogSoftmax LpNormalization LpPool MatMul MaxPool "
        "MeanVarianceNormalization NonMaxSuppression NonZero PRelu ParametricSoftplus Pow QuantizeLinear RNN "
        "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Reciprocal ReduceL1 ReduceL2 "
        "ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare "
        "Relu Resize ReverseSequence RoiAlign Round ScaledTanh Scan Selu Sigmoid Sin Sinh Softmax Softplus "
        "Softsign Sqrt Tan Tanh ThresholdedRelu Upsample",
    ),
    (
        _OLD_FLOATS | _INTS,
        "Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Max Mean "
        "Min Mod Mul Neg Pad Range Scatter ScatterElements ScatterND Shrink Sign SpaceToDepth Sub Sum TopK",
    ),
    (
        _OLD_FLOATS | _INTS | _BOOL,
        "Expand EyeLike Flatten If Loop OneHot Split Tile Where",
    ),
    (
        _OLD_ALL,
        "Cast Concat Constant Gather GatherElements GatherND Identity Reshape Shape Size Slice Squeeze "
        "Transpose Trilu Unsqueeze",
    ),
    (
        _INTS,
        "ConstantOfShape",
    ),
    (
        _BOOL,
        "And Not Or Xor",
    ),
    (
        frozenset({_T.INT8}),
        "DequantizeLinear",
    ),
)  # fmt: skip


def operators(version: tuple[int, int]) -> Table:
    """Return the operators and types of a version of TensorRT.

    Args:
        version: major and minor number; 8.6, 10 or later.
    """
    if version < (10, 0):
        return _86
    return {name: types for name, types in _NEW.items() if SINCE.get(name, (10, 0)) <= version}
