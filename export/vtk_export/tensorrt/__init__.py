"""Parts of ``vtk export tensorrt``: the linter, the lines that build an engine, and the script that stamps it."""
