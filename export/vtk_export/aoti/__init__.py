"""AOTInductor export: a compiled ``.pt2``, its loaders and its gate."""
