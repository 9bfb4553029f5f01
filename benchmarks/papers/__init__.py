"""What five papers claim, tried at the smallest scale that may show it: `python benchmarks/papers`."""
