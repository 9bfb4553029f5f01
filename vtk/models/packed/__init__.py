"""One forward pass over images of many sizes and tasks, whose tokens are packed into one matrix of rows."""
