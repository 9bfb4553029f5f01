"""ONNX export of several tasks of one base, as files that share weights or as one file for mixed batches."""
