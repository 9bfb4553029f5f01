"""Files that are copied into a model repository as they are.

A server imports them by itself, without this package: they use numpy, and each what its own docstring says.
"""
