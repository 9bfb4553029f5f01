"""ONNX export of one model: its options and the export itself."""
