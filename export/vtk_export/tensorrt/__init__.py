"""TensorRT export: the file, its build scripts and their options."""
