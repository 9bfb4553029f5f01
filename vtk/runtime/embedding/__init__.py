"""Writes the pooled features of images to a table, with any back-end."""
