"""Objectives: losses of a batch, for one class or many labels an image, with or without a teacher."""
