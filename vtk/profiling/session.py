"""Loads back-ends for one source, exports for them what they run, and knows the right logits."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk.errors import UsageError, VerificationError, VtkError
from vtk.models.devices import FP8
from vtk.profiling.compare import gives_probabilities, torch_reference
from vtk.profiling.config import ProfileConfig
from vtk.profiling.inputs import Inputs
from vtk.profiling.memory import release
from vtk.runtime.backends.base import Backend, least_images
from vtk.runtime.data_option import fp8_images
from vtk.runtime.engine_files import model_beside, read_stamp
from vtk.runtime.onnx_file import open_onnx
from vtk.runtime.source import Source

Loader = Callable[..., Backend]

FILES = ("onnx", "aoti", "tensorrt")
"""Kinds of sources that hold no model in torch."""


@dataclass(frozen=True)
class Reference:
    """What outputs are compared with.

    Attributes:
        logits: (n, classes), fp32, CPU.
        described: how they were computed.
        kind: which tolerance holds, see `vtk.profiling.compare.compare`.
        cautions: what weakens them.
        probabilities: they are logarithms of probabilities: of the logits only the differences are known.
    """

    logits: Tensor
    described: str
    kind: str
    cautions: tuple[str, ...] = ()
    probabilities: bool = False


Answers = Callable[[Inputs], Reference]
"""Computes a reference that is no single source, for instance each image's by its own task's model."""


class Session:
    """Files that it has to export first live as long as the session.

    Attributes:
        stopped: set where somebody pressed Ctrl-C while cells were measured.
    """

    def __init__(
        self,
        config: ProfileConfig,
        source: Source,
        load: Loader,
        device: torch.device,
        threads: int,
        reference: "Source | Answers | None" = None,
    ) -> None:
        self.config, self.source, self.load, self.device, self.threads = config, source, load, device, threads
        self._reference = reference or source
        self.stopped = False
        self._files = ExitStack()
        self._made: dict[str, Source | VtkError] = {}
        self._made_s: dict[str, float] = {}

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def prepare(self, names: Sequence[str]) -> None:
        """Export what back-ends need, and load each one that was asked for by name once.

        So an absent one ends the run before it has begun, and nothing is printed into the progress bar later.
        """
        for name in self.config.backends:
            if not fits(name, self.source.kind):  # refused before anything is exported for the others
                device, dtype = self.device, self.config.precision
                self.load(name, self.source, device=device, dtype=dtype, threads=self.threads).close()
        for name in names:
            self._source_for(name)
        for name in self.config.backends:
            if isinstance(self._source_for(name), VerificationError):
                continue  # a row says so
            if name == "eager" and self.source.kind not in FILES:
                continue  # torch is here
            if self.config.precision == FP8:
                continue  # calibrated once is enough
            with self.loaded(name):
                pass

    def reference(self, inputs: Inputs) -> Reference:
        """Compute what outputs are compared with.

        Raises:
            UsageError: a reference that takes other images than the source, or is itself a file of many tasks.
        """
        if not isinstance(self._reference, Source):
            return self._reference(inputs)
        source = self._reference
        given = "" if source is self.source else f" of {source.name}"
        raw = self.source.facts.preprocessing
        if source is not self.source and source.facts.preprocessing and not raw:
            raise UsageError(f"`--reference` {source.name} takes raw images, {self.source.name} normalised ones; give "
                             "the pack it was made from")  # fmt: skip
        if source is not self.source and (told := _differ(source, self.source)):
            raise UsageError(f"`--reference` {source.name} is not what {self.source.name} was made from: {told}; give "
                             "its own pack")  # fmt: skip
        # bytes are prepared by Pillow for all but the file that prepares them itself
        outside = raw and not source.facts.preprocessing
        kind: str = "raw" if outside else self.config.precision
        kind = self.source.facts.kind if self.source.facts.kind in ("int8", "fp8") else kind
        how = " with Pillow's preprocessing" if outside else ""
        images = inputs.normalised(source.card.input) if outside else inputs.images
        if source.kind == "tensorrt" and (model := _model_of(source)) is not None:
            given, source = f" of {model.path.name if model.path else model.name}", model
        if source.kind not in FILES:
            return Reference(torch_reference(source.model(), images), f"torch fp32 on the CPU{given}{how}", kind)
        name, options, said, cautions = self._way(source)
        # a file of another precision than asked for is refused by its back-end; a reference has its own
        dtype = source.facts.precision if source is not self.source else self.config.precision
        backend = self.load(name, source, dtype=dtype, threads=self.threads, **options)
        size = backend.batch or max(least_images(backend), 1 if source.kind in ("aoti", "tensorrt") else 8)
        more = inputs.more if source is self.source else {}
        try:
            logits = _rows_of(backend, {inputs.name if not outside else "pixel_values": images, **more}, size)
        finally:
            backend.close()
        return Reference(logits, f"{said}{given}{how}", kind, cautions, gives_probabilities(backend))

    def _way(self, source: Source) -> tuple[str, dict[str, Any], str, tuple[str, ...]]:
        """Return back-end and options that run an exported file as a reference, words for it, and what weakens it."""
        if source.kind == "onnx":
            options: dict[str, Any] = {"optimize": False, **({"raw": True} if source.facts.preprocessing else {})}
            if source.facts.precision == "bf16":  # onnxruntime has no bf16 arithmetic on a CPU
                return "ort-cuda", {**options, "device": self.device}, "onnxruntime on CUDA without optimisation", ()
            return "ort-cpu", {**options, "device": "cpu"}, "onnxruntime on the CPU without graph optimisation", ()
        caution = f"nothing independent is at hand for {source.name}: give the pack it was made of as --reference"
        return source.kind, {"device": self.device}, "the file itself, one image at a time", (caution,)

    def prepare_s(self, name: str) -> float | None:
        """Return the seconds that making the file for ``name`` took, None where it needs none."""
        return self._made_s.get(form(name))

    @contextmanager
    def loaded(self, name: str) -> Iterator[Backend]:
        """Load a back-end, and close it at the end of the block.

        Raises:
            VtkError: it, or the file that it runs, cannot be had.
        """
        source = self._source_for(name)
        if isinstance(source, VtkError):
            raise source
        # `--device auto` may mean CUDA; a CPU back-end asked for by name still runs, and its row says where
        device = torch.device("cpu") if name == "ort-cpu" and self.config.device == "auto" else self.device
        options: dict[str, Any] = {}
        if name.startswith("bank") and self.config.tasks:
            options["tasks"] = self.config.tasks
        if name.startswith("ort-") and source.facts.preprocessing:
            options["raw"] = True
        options |= fp8_images(source, self.config.precision, self.config.data)
        backend = self.load(name, source, device=device, dtype=self.config.precision, threads=self.threads, **options)
        try:
            if "raw" in options and not {"logits", "probabilities"} & set(getattr(backend, "outputs", ("logits",))):
                raise UsageError(f"{source.path} gives no logits to compare; export it with --output both")
            yield backend
        finally:
            backend.close()
            del backend
            release(device, collect=True)

    def file_of(self, name: str) -> Path | None:
        """Return the file that a back-end runs, None for a model in torch."""
        source = self._source_for(name)
        return source.path if isinstance(source, Source) and source.kind in FILES else None

    def _source_for(self, name: str) -> Source | VtkError:
        """Return what ``name`` runs: the source, or a file exported from it once."""
        kind = form(name)
        if not kind or kind == self.source.kind or self.source.kind in FILES:
            return self.source  # of the wrong kind perhaps: the back-end says so best
        if kind not in self._made:
            start = time.perf_counter()
            self._made[kind] = self._export(kind)
            if isinstance(self._made[kind], Source):
                self._made_s[kind] = time.perf_counter() - start
        return self._made[kind]

    def _export(self, kind: str) -> Source | VtkError:
        # both need onnx, which the other back-ends do without
        try:
            if kind == "aoti":
                from vtk_export.aoti.export import temporary_aoti

                made = temporary_aoti(
                    self.source, precision=self.config.precision, device=self.device, threads=self.threads
                )
                return self._files.enter_context(made)
            from vtk_export.onnx.export import temporary_onnx

            return self._files.enter_context(temporary_onnx(self.source, dtype=self.config.precision))  # type: ignore[arg-type]
        except VtkError as error:
            return error


def _model_of(engine: Source) -> Source | None:
    """Return the ONNX file beside an engine, which onnxruntime runs as something independent."""
    assert engine.path is not None
    path = model_beside(engine.path, read_stamp(engine.path))
    return None if path is None or engine.facts.precision == "bf16" else open_onnx(path)


def _differ(one: Source, other: Source) -> str:
    """Say in which way outputs of two sources cannot be the same; empty where they may."""
    a, b = one.card, other.card
    if len(a.classes) != len(b.classes):
        return f"{len(a.classes)} and {len(b.classes)} classes"
    if one.described and other.described and a.classes != b.classes:
        first, second = next(pair for pair in zip(a.classes, b.classes, strict=True) if pair[0] != pair[1])
        return f"output {a.classes.index(first)} is {first} in one and {second} in the other"
    shapes = [(card.input.in_chans, *card.input.size) for card in (a, b)]
    return "" if shapes[0] == shapes[1] else "images of {} and {}".format(*("×".join(map(str, s)) for s in shapes))


def _rows_of(backend: Backend, inputs: Mapping[str, Tensor], size: int) -> Tensor:
    """Run ``size`` rows at a time, the last call filled up with copies, and return all logits, fp32, CPU."""
    count, found = len(next(iter(inputs.values()))), []
    for start in range(0, count, size):
        index = (torch.arange(start, start + size)).clamp_max(count - 1)
        rows = {name: value[index] for name, value in inputs.items()}
        found.append(backend.run(rows)["logits"].float().cpu()[: count - start])
    logits = torch.cat(found)
    if not bool(torch.isfinite(logits).all()):
        raise VerificationError(f"the reference, {backend.name}, gives logits that are infinite or not a number; the "
                                "file is damaged, or give --reference PACK")  # fmt: skip
    return logits


def fits(name: str, kind: str) -> bool:
    """Return whether a back-end runs a kind of source, exported on the spot if need be."""
    if name.startswith("bank"):
        return kind == "pack"
    if name == "tensorrt":
        return kind in ("tensorrt", "onnx")
    return kind not in FILES or kind == form(name)


def form(name: str) -> str:
    """Return the kind of file that a back-end runs, empty for a model in torch."""
    return "onnx" if name.startswith("ort-") else "aoti" if name == "aoti" else ""
