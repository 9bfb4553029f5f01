"""TensorRT export: a linted ONNX file with the scripts that build its engine."""
