"""A ``.pt2`` of AOTInductor: the model compiled to a shared library, run without Python's part of torch.

Such a file belongs to the torch release, the kind of device and the instruction set it was made with; its metadata say
which, and are held against this machine before anything of it is loaded: the library itself would crash, not refuse.
"""

import platform
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vtk.card import Card
from vtk.errors import DataError, UnavailableError, UsageError
from vtk.formats import parse_json
from vtk.models.compiling import check_compiler
from vtk.models.fp32 import FullPrecision
from vtk.readers import check_plain, reading
from vtk.runtime.facts import Facts
from vtk.runtime.source import Source

MAX_BATCH = 4096
"""Largest batch that a file is made for."""

CARD, DTYPE, TORCH, DEVICE, CPU = "vtk", "vtk.precision", "vtk.torch", "AOTI_DEVICE_KEY", "vtk.cpu"
"""Keys of a file's metadata."""

_LONGEST = 16 << 20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LEVELS = ("DEFAULT", "NO AVX", "AVX2", "AVX512")


def torch_release() -> str:
    """Return major and minor version: libraries of one release fit together."""
    return ".".join(torch.__version__.split(".")[:2])


def cpu_level() -> str:
    """Return the instruction set that inductor compiles for on this CPU."""
    return torch.backends.cpu.get_cpu_capability()


def read_metadata(path: Path) -> dict[str, str]:
    """Read what a ``.pt2`` says of itself; nothing is unpickled or loaded.

    Raises:
        DataError: not a file of AOTInductor.
    """
    check_plain(path, "a .pt2")
    with reading(path, "is not a readable .pt2 file"), zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if "/aotinductor/" in n and n.endswith("wrapper_metadata.json")]
        text = b""
        if names:
            with archive.open(names[0]) as file:
                text = file.read(_LONGEST + 1)  # not what the archive says that it unpacks to
        if len(text) > _LONGEST:
            raise DataError(f"{path} has more than {_LONGEST:,} bytes of metadata; give one made by `vtk export aoti`")
        value = parse_json(text.decode("utf-8"), f"the metadata of {path}") if names else None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a file of AOTInductor; give one made by `vtk export aoti`")
    return {str(k): str(v) for k, v in value.items()}


def is_ours(path: Path) -> bool:
    """Return whether a file is a ``.pt2`` that this toolkit wrote."""
    try:
        return CARD in read_metadata(path)
    except DataError:
        return False


def open_aoti(path: Path) -> Source:
    """Read the card of a ``.pt2``.

    Raises:
        DataError: damaged, or not made by this toolkit: then its input and classes are unknown.
    """
    meta = read_metadata(path)
    if CARD not in meta or meta.get(DTYPE) not in _DTYPES:
        raise DataError(f"{path} carries no vtk card; give a file made by `vtk export aoti`")
    name = path.parent.name if path.stem == "model" and path.parent.name else path.name
    return Source("aoti", name, path, Card.from_json(meta[CARD], path), facts=Facts(meta[DTYPE]))


def device_of(source: Source) -> str:
    """Return the kind of device that a ``.pt2`` was made for: ``cpu`` or ``cuda``."""
    return "cpu" if source.path is None else read_metadata(source.path).get(DEVICE, "cpu")


class AotiBackend:
    """A loaded ``.pt2``; ``threads`` is torch's global number, and `close` puts the earlier one back."""

    name = "aoti"
    batch: int | None = None
    most = MAX_BATCH

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype, size: tuple[int, ...]) -> None:
        self.device, self.dtype, self.size = device, dtype, size
        self.load_s = 0.0
        self._threads_before: int | None = None
        self._fp32 = FullPrecision()  # a library reads torch's settings when it runs
        # the package's own loader of threads is for servers: one run at a time needs none
        self._model: Any = torch._inductor.aoti_load_package(
            str(path), run_single_threaded=True, device_index=device.index if device.type == "cuda" else -1
        )

    @classmethod
    def check(cls) -> None:
        """Do nothing: loading needs only torch; what a file needs stands in its metadata."""

    @classmethod
    def check_compiler(cls) -> None:
        """Refuse to make a file where there is no C++ compiler.

        Raises:
            UnavailableError: says so.
        """
        check_compiler("AOTInductor", "export elsewhere")

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Load ``source.path`` after its metadata were held against this machine; there are no options."""
        import torch._inductor

        if source.kind != "aoti" or source.path is None:
            raise UsageError(f"`aoti` runs .pt2 files, not the {source.kind} {source.name}: `vtk export aoti`")
        if options:
            raise UsageError(f"back-end `aoti` has no option `{min(options)}`; it has none")
        meta = read_metadata(source.path)
        if dtype != _DTYPES[meta[DTYPE]]:
            raise UsageError(
                f"{source.path} computes in {meta[DTYPE]}, not in {dtype}; a file's precision is fixed, give "
                f"--precision {meta[DTYPE]}"
            )
        _check_machine(source.path, meta, device)
        spec = source.card.input
        start = time.perf_counter()
        before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            backend = cls(source.path, device, dtype, (spec.in_chans, spec.height, spec.width))
        except RuntimeError as error:
            torch.set_num_threads(before)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"{source.path} cannot be loaded ({reason}); export it again on this machine") from error
        backend._threads_before = before if threads is not None else None
        backend.load_s = time.perf_counter() - start
        return backend

    @property
    def provider(self) -> str:
        """``aotinductor cpu`` or ``aotinductor cuda (NAME)``."""
        cpu = self.device.type == "cpu"
        return "aotinductor " + ("cpu" if cpu else f"cuda ({torch.cuda.get_device_name(self.device)})")

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes).

        Raises:
            UsageError: images of another size, or more than the file takes: the library would read beyond their end.
        """
        images = inputs["pixel_values"]
        if images.ndim != 4 or tuple(images.shape[1:]) != self.size or not 1 <= len(images) <= MAX_BATCH:
            wanted = f"(1 to {MAX_BATCH}, {', '.join(map(str, self.size))})"
            raise UsageError(f"images are {tuple(images.shape)}; this file takes {wanted}: resize or split them")
        with torch.inference_mode():
            return {"logits": self._model(images.to(self.device, self.dtype, non_blocking=True).contiguous())}

    def synchronize(self) -> None:
        """Wait for the CUDA device; on a CPU `run` returns when it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Drop the library and put torch's number of threads back."""
        self._model = None
        self._fp32.release()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None


def _check_machine(path: Path, meta: Mapping[str, str], device: torch.device) -> None:
    """Refuse a file that was made for another torch, device or instruction set.

    Raises:
        UnavailableError: names what it was made for and what is here.
    """
    again = "export it again on the machine that runs it"
    if meta.get(TORCH) != torch_release():
        raise UnavailableError(f"{path} was made with torch {meta.get(TORCH)}, this is {torch_release()}; {again}")
    if (machine := meta.get("AOTI_MACHINE", platform.machine())) != platform.machine():
        raise UnavailableError(f"{path} was made for {machine}, this is {platform.machine()}; {again}")
    kind = meta.get(DEVICE, "")
    if kind != device.type:
        raise UnavailableError(f"{path} was made for {kind}, and {device} was asked for; give --device {kind}")
    if kind == "cuda":
        here = "{}{}".format(*torch.cuda.get_device_capability(device))
        made = meta.get("AOTI_COMPUTE_CAPABILITY", "")
        if made and made != here:
            raise UnavailableError(f"{path} was made for compute capability {made}, this GPU has {here}; {again}")
    elif _rank(meta.get(CPU, "")) > _rank(cpu_level()):
        raise UnavailableError(f"{path} was made for CPUs with {meta.get(CPU)}, this one has {cpu_level()}; {again}")


def _rank(level: str) -> int:
    return _LEVELS.index(level) if level in _LEVELS else 0
