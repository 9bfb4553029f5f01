"""Loads the compiled model that lies beside this file. It needs torch, and no other package.

    from load import load

    model = load()            # model.pt2 beside this file
    logits = model(images)    # its size, type and device: model.shape, model.dtype, model.device

The compiled code itself does not look at what it is given: by default it answers images of a wrong layout, size or type
with wrong classes or from memory beyond them. Its checks are switched on by an environment variable that each library
reads once, at its first call, and they refuse a batch of one where the batch may vary. So the file holds two models:
``batch_1`` takes one image, ``batch_n`` takes more. `load` switches the checks on and proves it; `Model` chooses.
"""

import contextlib
import json
import os
import platform
import threading
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
"""The variable that switches a library's own checks on."""
ONE, MORE = "batch_1", "batch_n"
"""Names of the two models."""
_LOCK = threading.Lock()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEVELS = ("DEFAULT", "NO AVX", "AVX2", "AVX512")
"""Instruction sets, each with all before it."""
_LONGEST = 1 << 26


def load(path: str | os.PathLike[str] | None = None, *, device_index: int | None = None) -> "Model":
    """Load both models of a file, and prove that they refuse what they cannot take.

    Args:
        path: the file; by default ``model.pt2`` beside this one.
        device_index: which GPU; None for torch's current one. A file for CPUs has none.

    Raises:
        RuntimeError: made for another machine or torch release, not a file of this kind, or its checks are off.
    """
    from torch._inductor.package import load_package  # type: ignore[attr-defined]

    path = Path(__file__).with_name("model.pt2") if path is None else Path(path)
    meta = read_metadata(path).get(MORE, {})
    if fault := machine_fault(meta, device_index) if meta else f"it has no model {MORE}":
        raise RuntimeError(f"{path} cannot be loaded: {fault}")
    shape, dtype = tuple(int(side) for side in meta["vtk.input"].split(",")), DTYPES[meta["vtk.precision"]]
    device = torch.device(meta["AOTI_DEVICE_KEY"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device_index is None else device_index)
    index = -1 if device.index is None else device.index
    models: dict[str, Any] = {}
    with checks("1"):
        for name, wrong in ((ONE, 2), (MORE, 1)):
            models[name] = load_package(os.fspath(path), name, run_single_threaded=True, device_index=index)
            # its first call, at which the variable is read: the other model's batch, within memory even if unchecked
            if not _refuses(models[name], torch.zeros(wrong, *shape, dtype=dtype, device=device)):
                raise RuntimeError(f"{path}: {name} does not check its input; do not use it, export the file again")
    return Model(models, shape, dtype, device, int(meta["vtk.max_batch"]))


class Model:
    """A loaded ``.pt2``: a function of images. Threads may share it; their calls follow each other.

    Attributes:
        shape: (channels, height, width) of an image.
        dtype: of images and logits.
        device: that it runs on.
        max_batch: most images of a call.
    """

    def __init__(
        self, models: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, max_batch: int
    ) -> None:
        """Take loaded models; `load` makes this."""
        self._models = models
        self.shape, self.dtype, self.device, self.max_batch = shape, dtype, device, max_batch
        # a library is for one call at a time; its own queue can wait for ever after a call that failed
        self._alone = threading.Lock()
        _MODELS.add(self)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, *shape) of any layout to logits (B, classes), without gradients.

        Raises:
            TypeError: not a tensor, of another type, or of a kind without plain memory (sparse, quantised, wrapped).
            ValueError: of another size, number or device.
        """
        images = self._plain(images)
        with self._alone:
            logits: torch.Tensor = self._models[ONE if len(images) == 1 else MORE](images)
        return logits

    def _plain(self, images: torch.Tensor) -> torch.Tensor:
        """Return images whose memory is what the libraries read: a copy where it is not."""
        if not isinstance(images, torch.Tensor):
            raise TypeError(f"images are a {type(images).__name__}; give a torch tensor")
        if type(images).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or images.is_nested:
            raise TypeError(f"images are a {type(images).__name__} without memory of its own; give a plain tensor")
        if images.dtype != self.dtype or images.layout != torch.strided:
            raise TypeError(f"images are {images.dtype}, {images.layout}; this model takes {self.dtype}, torch.strided")
        if tuple(images.shape[1:]) != self.shape or not 1 <= len(images) <= self.max_batch:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"images are {tuple(images.shape)}; this model takes (1 to {self.max_batch}, {wanted})")
        if images.device != self.device:
            raise ValueError(f"images are on {images.device}; this model is on {self.device}")
        # a shrunk storage leaves shape and strides as they were
        reach = 1 + sum((size - 1) * step for size, step in zip(images.shape, images.stride(), strict=True))
        if (
            not images._is_zerotensor()
            and images.untyped_storage().nbytes() < (images.storage_offset() + reach) * images.element_size()
        ):
            raise ValueError(f"images are {tuple(images.shape)}, but their memory was given up or is shorter")
        channels, height, width = self.shape
        strides = (channels * height * width, height * width, width, 1)
        # `contiguous` would keep odd strides of dimensions of length 1, a pending sign, and zeros without memory
        if images.stride() != strides or images.is_neg() or not (memory := images.data_ptr()) or memory % 64:
            images = torch.empty(images.shape, dtype=self.dtype, device=self.device).copy_(images)
        return images


_MODELS: "weakref.WeakSet[Model]" = weakref.WeakSet()


def _after_fork() -> None:
    """Let a forked process call: a thread that was in a call, and would have ended it, is not there."""
    global _LOCK
    _LOCK = threading.Lock()
    for model in _MODELS:
        model._alone = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, dict[str, str]]:
    """Read what each model of a ``.pt2`` says of itself, by its name; nothing is unpickled or loaded.

    Raises:
        OSError: the file cannot be read.
        zipfile.BadZipFile, ValueError: it is damaged or of another kind.
    """
    found = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.namelist():
            _, _, inner = entry.partition("/data/aotinductor/")
            if inner.endswith("wrapper_metadata.json"):
                if archive.getinfo(entry).file_size > _LONGEST:
                    raise ValueError(f"{entry} is longer than any description of a model")
                value = json.loads(archive.read(entry))
                if not isinstance(value, dict):
                    raise ValueError(f"{entry} describes no model")
                found[inner.partition("/")[0]] = {str(k): str(v) for k, v in value.items()}
    return found


def machine_fault(meta: dict[str, str], device_index: int | None = None) -> str:
    """Return why a library cannot run here, where it would crash in place of refusing; empty if it can."""
    release, here = ".".join(torch.__version__.split(".")[:2]), platform.machine()
    level, own = meta.get("vtk.cpu", ""), torch.backends.cpu.get_cpu_capability()
    if meta.get("vtk.torch") != release:
        return f"it was made with torch {meta.get('vtk.torch')}, this is {release}"
    if meta.get("AOTI_MACHINE", here) != here:
        return f"it was made for {meta['AOTI_MACHINE']}, this is {here}"
    if meta.get("AOTI_DEVICE_KEY") == "cuda":
        if not torch.cuda.is_available():
            return "it was made for a GPU, here is none"
        own = "{}{}".format(*torch.cuda.get_device_capability(device_index))
        made = meta.get("AOTI_COMPUTE_CAPABILITY") or own
        return "" if made == own else f"it was made for compute capability {made}, this GPU has {own}"
    if level in LEVELS and LEVELS.index(level) > (LEVELS.index(own) if own in LEVELS else 0):
        return f"it was made for CPUs with {level}, this one has {own}"
    return ""


@contextlib.contextmanager
def checks(value: str) -> Iterator[None]:
    """Set the variable for libraries whose first call is inside the block; later ones find what was there before."""
    with _LOCK:
        before = os.environ.get(CHECKS)
        os.environ[CHECKS] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[CHECKS]
            else:
                os.environ[CHECKS] = before


def _refuses(model: Any, images: torch.Tensor) -> bool:
    with _quiet():
        try:
            model(images)
        except RuntimeError:
            return True
    return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what a library writes to the process's standard error, where it reports a refusal that it also raises."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
