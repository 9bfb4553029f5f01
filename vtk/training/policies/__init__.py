"""Policies: the parameters that a run trains, chosen by module type."""
