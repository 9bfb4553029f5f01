"""Export of many tasks of one base: a file for each task, or one file that gathers each image's weights."""
