"""Weights that lie beside an ONNX file: whether they are there, and are what the file was made with."""

import re
from pathlib import Path
from typing import Any

from vtk.errors import DataError
from vtk.runtime.external import external_ends
from vtk.runtime.weight_digests import file_digest

_NAMED = re.compile(r".*-([0-9a-f]{12})\.data")
"""A file of `vtk export tasks`: its name ends in the first digits of the sha256 of its bytes."""
_AGAIN = "keep the files of an export together, or export it again"


def check_data_files(proto: Any, path: Path) -> None:
    """Check the files that an ONNX model's tensors lie in.

    Args:
        proto: the model, read without them.
        path: of the model.

    Raises:
        DataError: a file is missing, outside of the model's folder, shorter than the model says, or by its own name
            not what was written.
    """
    homes = {path.parent.resolve(), path.resolve().parent}  # of a model that is itself a link, too
    for location, end in external_ends(proto, path).items():
        file = path.parent / location
        if not file.is_file():
            raise DataError(f"{path} has weights in {location}, which is not beside it; {_AGAIN}")
        if not any(file.resolve().is_relative_to(home) for home in homes):
            raise DataError(f"{file} is a link to a file outside of its folder; {_AGAIN}")
        if file.stat().st_size < end:
            raise DataError(f"{file} has {file.stat().st_size} bytes, {path.name} needs {end} of it; {_AGAIN}")
        named = _NAMED.fullmatch(location)
        if named and file_digest(file)[:12] != named[1]:
            raise DataError(f"{file} is damaged: its bytes are not those its name tells of; {_AGAIN}")
