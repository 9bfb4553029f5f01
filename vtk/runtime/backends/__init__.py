"""Back-ends: one protocol over torch, the fused model, a bank, ONNX Runtime, AOTInductor and TensorRT."""
