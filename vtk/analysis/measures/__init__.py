"""Measurements of a model: each computes numbers, and knows nothing of plots or pages."""
