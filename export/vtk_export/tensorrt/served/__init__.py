"""Files that are copied beside a model and run there, without this toolkit."""
