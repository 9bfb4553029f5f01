"""Parts of ``vtk export triton``: configs, names, publishing, and the files that a server runs (`served`)."""
