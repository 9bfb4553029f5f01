"""The report of an analysis: a page, its plots, and the terminal's tables."""
