"""Probes: access to activations, attention, features and curvature of any model, for the measures."""
