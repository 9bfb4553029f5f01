"""The back-ends and precisions that are tried for a source, and the files that they run."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vtk import console
from vtk.errors import UsageError, VtkError
from vtk.profiling.config import ProfileConfig
from vtk.profiling.session import supports
from vtk.runtime.backends.base import check_backend, least_images, load_backend, most_images, needs_onnx
from vtk.runtime.opening import open_source
from vtk.runtime.source import MODELS, Source

BACKENDS = ("openvino", "ort-cpu", "fused", "eager", "bank", "aoti")
"""Back-ends that the search knows. Those of `DEFAULT` are tried if none is named."""
DEFAULT = ("openvino", "ort-cpu", "fused")

INT8: dict[str, Literal["static", "dynamic"]] = {"int8": "static", "int8-dynamic": "dynamic"}
"""Precision of a setup to the ``--int8`` of its file."""


@dataclass(frozen=True)
class Variant:
    """A back-end and a precision.

    Attributes:
        backend: as on the command line.
        precision: of a `vtk.profiling.search.setup.Setup`.
        source: that the back-end loads; None if there is none.
        dtype: that it is loaded in.
        least: fewest images of a call.
        most: most images of a call, one where outputs depend on the other images of a call; None if any number goes.
        refused: why it is not tried, in one line.
    """

    backend: str
    precision: str
    source: Source | None = None
    dtype: str = "fp32"
    least: int = 1
    most: int | None = None
    refused: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """As `Setup.variant`."""
        return self.backend, self.precision

    @property
    def kind(self) -> str:
        """The precision whose limits hold: a key of `vtk_export.gate.limits.LIMITS`."""
        return "int8" if self.precision.startswith("int8") else self.precision

    @property
    def options(self) -> dict[str, Any]:
        """Options of `load_backend`."""
        raw = self.source is not None and self.source.facts.preprocessing
        return {"raw": True} if raw and (needs_onnx(self.backend) or self.backend == "openvino") else {}


def find_variants(source: Source, config: ProfileConfig, stack: ExitStack) -> list[Variant]:
    """Return what can be tried for a source; the files that are exported for it live as long as ``stack``.

    Raises:
        UsageError: a named back-end that is not for this source, or that the search does not know.
        UnavailableError: a named back-end that is not installed.
    """
    for name in config.backends:
        if name not in BACKENDS:
            raise UsageError(f"`--on cpu` searches {', '.join(BACKENDS)}, not {name}; leave it out of --backends")
        if not supports(name, source.kind):
            raise UsageError(f"`{name}` does not run the {source.kind} {source.name}; leave it out of --backends")
        check_backend(name)
    names = config.backends or tuple(name for name in DEFAULT if supports(name, source.kind)) or (source.kind,)
    found: list[Variant] = []
    files = _Files(source, config, stack)
    for name in names:
        try:
            check_backend(name)
        except VtkError as error:
            found.append(Variant(name, source.facts.kind, refused=str(error)))
            continue
        for precision in _precisions(name, source, config):
            found.append(_variant(name, precision, source, files))
    if not found:
        raise UsageError(f"none of {', '.join(names)} computes in {config.precision}; leave --precision out")
    return found


def bf16_is_native() -> bool:
    """Return whether this processor multiplies bf16: without that it is slower than fp32."""
    import torch

    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


def _precisions(name: str, source: Source, config: ProfileConfig) -> Sequence[str]:
    """Return the precisions of a back-end on a source, those that ``--precision`` allows."""
    if source.kind in MODELS:
        int8 = ("int8",) if config.data is not None else ()
        alone = ("int8-dynamic",) if config.data is not None else ()
        known = {
            "openvino": (*_openvino_bf16(), "fp32", *int8),
            "ort-cpu": ("fp32", *int8, *alone),
        }.get(name, ("fp32", "bf16") if bf16_is_native() else ("fp32",))
    elif source.facts.int8:
        known = ("int8-dynamic",) if source.facts.int8 == "dynamic" else ("int8",)
    elif name == "openvino":
        known = (*_openvino_bf16(), "fp32")
    else:
        known = (source.facts.precision,)
    return known if config.precision == "auto" else tuple(p for p in known if p == config.precision)


def _openvino_bf16() -> tuple[str, ...]:
    from vtk.runtime.openvino_runtime import default_precision

    return ("bf16",) if default_precision() == "bf16" else ()


def _variant(name: str, precision: str, source: Source, files: "_Files") -> Variant:
    dtype = "fp32" if precision in INT8 else precision
    if name == "openvino" and precision in INT8:
        from vtk.runtime.openvino_runtime import default_precision

        dtype = default_precision()  # of what is not int8
    made = files.of(name, precision)
    if isinstance(made, VtkError):
        return Variant(name, precision, None, dtype, refused=" ".join(str(made).split()))
    found = Variant(name, precision, made, dtype, most=1 if made.facts.apart else None)
    return found if source.kind in MODELS else _limited(found)


def _limited(variant: Variant) -> Variant:
    """Load a given file once, and return its variant with the batch sizes that it takes, or why it does not run."""
    assert variant.source is not None
    try:
        backend = load_backend(variant.backend, variant.source, dtype=variant.dtype, threads=1, **variant.options)
    except VtkError as error:
        return replace(variant, source=None, refused=" ".join(str(error).split()))
    try:
        least, most = (backend.batch,) * 2 if backend.batch else (least_images(backend), most_images(backend))
    finally:
        backend.close()
    return replace(variant, least=least, most=variant.most or most)


class _Files:
    """Exports what back-ends run, each file once."""

    def __init__(self, source: Source, config: ProfileConfig, stack: ExitStack) -> None:
        self.source, self.config, self.stack = source, config, stack
        self._made: dict[tuple[str, str], Source | VtkError] = {}

    def of(self, name: str, precision: str) -> Source | VtkError:
        """Return what a back-end runs in a precision, or why there is no such file."""
        if self.source.kind not in MODELS or not (needs_onnx(name) or name == "aoti"):
            return self.source
        if name == "openvino" and precision == "fp32" and isinstance(made := self._made.get((name, "bf16")), Source):
            return made  # it rounds the products of an fp32 file by itself, and was verified in both
        key = (name, precision)
        if key not in self._made:
            make = {"aoti": self._aoti, "openvino": self._openvino}.get(name, self._onnx)
            try:
                self._made[key] = make(precision)
            except VtkError as error:
                self._made[key] = error
        return self._made[key]

    def _openvino(self, precision: str) -> Source:
        from vtk_export.openvino.config import OpenvinoConfig
        from vtk_export.openvino.export import export_openvino

        own: dict[str, Any] = {"int8": INT8[precision]} if precision in INT8 else {"precision": precision}
        config = OpenvinoConfig(out=self._folder("OpenVINO", precision), **own, **self._common())
        return open_source(export_openvino(self.source, config, show=False).path)

    def _aoti(self, precision: str) -> Source:
        import torch

        from vtk_export.aoti.export import temporary_aoti

        device, threads = torch.device("cpu"), self.config.threads or torch.get_num_threads()
        made = temporary_aoti(self.source, precision=precision, device=device, threads=threads)
        return self.stack.enter_context(made)

    def _onnx(self, precision: str) -> Source:
        from vtk_export.onnx.config import OnnxConfig
        from vtk_export.onnx.export import export_onnx

        config = OnnxConfig(out=self._folder("ONNX", precision), int8=INT8.get(precision), **self._common())
        return open_source(export_onnx(self.source, config, show=False).path)

    def _folder(self, what: str, precision: str) -> Path:
        """Return a folder for an export, and say what is exported."""
        console.say(f"exporting {self.source.name} to {what}, {precision}")
        temporary = tempfile.TemporaryDirectory(prefix="vtk-search-", ignore_cleanup_errors=True)
        return Path(self.stack.enter_context(temporary)) / "export"

    def _common(self) -> dict[str, Any]:
        """Return the options of all exports: those of the command that is recommended in the end."""
        return {"data": self.config.data, "seed": self.config.seed}
