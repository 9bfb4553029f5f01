"""The audit of a set of images before training: classes, held-out part, duplicates, unusual images, and its page."""
