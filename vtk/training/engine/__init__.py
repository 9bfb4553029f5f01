"""The training engine: the loop, its optimisers, number formats, processes and callbacks."""
