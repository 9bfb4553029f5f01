"""Runs: from options to images and a model, and from a trained model to files."""
