"""Claims of five papers, tested at the smallest scale that may show them: `python benchmarks/papers`."""
