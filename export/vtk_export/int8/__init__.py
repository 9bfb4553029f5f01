"""Static int8: one recipe for the files of ONNX Runtime, OpenVINO and TensorRT.

`quantize` turns an fp32 graph and calibration images into a graph with QuantizeLinear and DequantizeLinear.
"""

from vtk_export.int8.plan import Plan, prepare, quantize
from vtk_export.int8.recipe import Recipe, recipe_for

__all__ = ["Plan", "Recipe", "prepare", "quantize", "recipe_for"]
