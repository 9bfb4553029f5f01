"""Parts of `vtk_export.tasks`: names, the gathered model, shared data files, the gate and the index."""
