"""Placeholder docstring, replaced by the package owner."""
