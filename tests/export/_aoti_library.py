"""Stands for a compiled library: reads the memory it is given, as compiled code does, and checks only when told to."""

import ctypes
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vtk.card import Card
from vtk.runtime import aoti_file

Model = Callable[[Tensor], Tensor]
CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"


class Library:
    """A library for ``least`` to ``most`` fp32 images: whether it checks them is read at its first call, once.

    Attributes:
        checking: whether it does; None before the first call.
        pointers: where the images of each answered call lay.
    """

    def __init__(
        self, model: Model, shape: tuple[int, ...], least: int, most: int, checked: str = CHECKS,
        overlooked: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.model, self.shape, self.least, self.most, self.variable = model, shape, least, most, checked
        self.overlooked = overlooked
        self.checking: bool | None = None
        self.pointers: list[int] = []

    def __call__(self, images: Tensor) -> Tensor:
        if self.checking is None:
            self.checking = os.environ.get(self.variable, "0")[0] != "0"
        c, h, w = self.shape
        if self.checking:
            faults = {
                "dtype": images.dtype != torch.float32, "size": images.shape[1:4] != self.shape,
                "strides": images.stride() != (c * h * w, h * w, w, 1),
                "least": len(images) < self.least, "most": len(images) > self.most,
            }  # fmt: skip
            if found := [name for name, fault in faults.items() if fault and name not in self.overlooked]:
                raise RuntimeError(f"input_handles[0]: unmatched {', '.join(found)}")
            if any(faults.values()):
                return torch.zeros(len(images), 5)  # of foreign memory
        self.pointers.append(images.data_ptr())
        count = len(images) * c * h * w
        memory = (ctypes.c_float * count).from_address(images.data_ptr())
        plain = torch.from_numpy(np.ctypeslib.as_array(memory).reshape(-1, c, h, w).copy())
        with torch.no_grad():
            return self.model(plain)

    def get_metadata(self) -> dict[str, str]:
        return {"AOTI_DEVICE_KEY": "cpu", "vtk.max_batch": str(self.most if self.most > 1 else 4096)}


def loader(model: Model, shape: tuple[int, ...] = (3, 32, 48), **changed: object) -> Callable[..., Library]:
    """In place of ``torch._inductor.package.load_package``: libraries by the names of a file's models."""
    ranges = {"batch_1": (1, 1), "batch_n": (2, 4096), "model": (2, 4096)}

    def load_package(path: object, name: str = "model", **_: object) -> Library:
        return Library(model, shape, *ranges[name], **changed)

    return load_package


def write_file(path: Path, card: Card, names: tuple[str, ...] = ("batch_1", "batch_n"), **changed: str) -> None:
    """A .pt2 with metadata and no library; of version 0.1 with the name ``model``."""
    spec = card.input
    meta = {
        "vtk": card.to_json(), "vtk.precision": "fp32", "vtk.cpu": aoti_file.cpu_level(),
        "vtk.torch": aoti_file.torch_release(), "AOTI_DEVICE_KEY": "cpu",
    }  # fmt: skip
    if names != ("model",):
        meta |= {"vtk.input": f"{spec.in_chans},{spec.height},{spec.width}", "vtk.max_batch": "4096"}
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"model/data/aotinductor/{name}/abc.wrapper_metadata.json", json.dumps(meta | changed))
