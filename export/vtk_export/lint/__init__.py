"""The linter of ONNX files for TensorRT's parser and fused kernels."""
