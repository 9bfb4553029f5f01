"""ONNX export of one model."""
